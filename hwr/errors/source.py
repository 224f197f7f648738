"""A canonical checkpoint that is refused."""

from __future__ import annotations

from typing import Any

from hwr.errors.base import HwrError
from hwr.outcomes import FailureCode, ResolutionStage


class SourceRejected(HwrError):
    """{file}: {problem}
    {remedy}"""

    code = FailureCode.CANONICAL_SOURCE_FAILED
    stage = ResolutionStage.CANONICAL_LOADING
    # Stock loading is allowed to try; what it must not try (a path that escapes, a partial set) says False.
    retryable = True


class NoWeights(SourceRejected):
    """{directory}: no safetensors weights here ({found}).
    Give the directory that holds model.safetensors, or shards with their *.safetensors.index.json."""

    code = FailureCode.NO_WEIGHTS


class AmbiguousWeights(SourceRejected):
    """{file}: a choice of weights that only a person can make: {problem}
    Leave one set of weights in the directory; if it has several files, give their index too."""

    # Stock loading picks by its own rule; what it picks gets no identity, so nothing is published.
    code = FailureCode.AMBIGUOUS_WEIGHTS


class SourceUnreadable(SourceRejected):
    """{file}: cannot be read: {problem}
    Check that the path exists and that this user may read it."""

    code = FailureCode.UNREADABLE


class LfsPointer(SourceRejected):
    """{file}: a Git LFS pointer, not weights; the real file has {expected} bytes, this one {file_bytes}.
    Fetch the content with `git lfs pull`, or download the model again."""

    code = FailureCode.LFS_POINTER

    def __init__(self, *, expected_bytes: int | None, **details: Any) -> None:
        """Build the message; `expected_bytes` is None if the pointer is cut before its size."""
        details["expected"] = "an unknown number of" if expected_bytes is None else expected_bytes
        super().__init__(expected_bytes=expected_bytes, **details)


class NotSafetensorsHtml(SourceRejected):
    """{file}: an HTML page, not weights ({file_bytes} bytes); a download was answered with an error page.
    Download the file again, signed in if the model is gated."""

    code = FailureCode.NOT_SAFETENSORS_HTML


class NotSafetensors(SourceRejected):
    """{file}: not a safetensors file: {problem}
    Download or convert the file again."""

    code = FailureCode.NOT_SAFETENSORS


class HeaderOverLimit(SourceRejected):
    """{file}: its header claims {declared_header_bytes} bytes; the limit is {limit} and the file has {file_bytes}.
    If the file is whole, split the model into more shards; if not, download it again."""

    code = FailureCode.HEADER_OVER_LIMIT


class HeaderInvalid(SourceRejected):
    """{file}: its header is not valid: {problem}
    Download the file again, or write it again with safetensors' own save_file."""

    code = FailureCode.HEADER_INVALID


class TensorInvalid(SourceRejected):
    """{file}: tensor {tensor!r}: {problem}
    Write the file again with safetensors' own save_file."""

    code = FailureCode.TENSOR_INVALID


class Truncated(SourceRejected):
    """{file}: truncated: {missing} of {expected} bytes are missing.
    Download the file again; the end never arrived."""

    code = FailureCode.TRUNCATED

    def __init__(self, *, missing_bytes: int, expected_bytes: int, header_cut: bool = False, **details: Any) -> None:
        """Build the message; what a header that is itself cut would have described is unknown, so both figures are the least."""
        least = "at least " if header_cut else ""
        details |= {"missing": f"{least}{missing_bytes}", "expected": f"{least}{expected_bytes}"}
        super().__init__(missing_bytes=missing_bytes, expected_bytes=expected_bytes, header_cut=header_cut, **details)


class TrailingBytes(SourceRejected):
    """{file}: {extra_bytes} bytes too many: the header describes {expected_bytes}, the file has more.
    Download the file again; two downloads may have been joined."""

    code = FailureCode.TRAILING_BYTES


class IndexInvalid(SourceRejected):
    """{file}: not a usable shard index: {problem}
    Download the index again together with its shards."""

    code = FailureCode.INDEX_INVALID
    retryable = False


class IndexMismatch(SourceRejected):
    """{file}: the index and the shards disagree: {problem}
    Download index and shards again from one revision; no partial model is loaded or published."""

    code = FailureCode.INDEX_MISMATCH
    retryable = False


class MissingShard(SourceRejected):
    """{file}: {problem}
    Download what is missing; a link that dangles counts as missing."""

    code = FailureCode.MISSING_SHARD
    retryable = False


class PathEscape(SourceRejected):
    """{file}: names {target!r}, which lies outside the model's folder.
    Do not load this checkpoint; get it from a source that you trust."""

    code = FailureCode.PATH_ESCAPE
    retryable = False


class SourceChanged(SourceRejected):
    """{file}: changed while it was read.
    Wait until the download has finished and start again."""

    code = FailureCode.SOURCE_CHANGED


class CanonicalLoadFailed(HwrError):
    """{model}: ordinary loading failed: {problem}
    {remedy}"""

    code = FailureCode.CANONICAL_SOURCE_FAILED
    stage = ResolutionStage.CANONICAL_LOADING
