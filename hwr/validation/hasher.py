"""The process that hashes a payload: run as a file, imports nothing of ours.

Owns one mapping a file and BLAKE3 over its units. Promises a line of JSON for each step on standard output, and to end when nobody
reads. It exists because a file that is truncated under a mapping kills whoever touches it (SIGBUS): this process may die, the
server that asked must not. Refuses anything but what standard input orders: a list of [fd, size, [[offset, length, digest], ...]].
"""

import json
import mmap
import sys
import time

REPORT_BYTES = 64 << 20
THREADS_PAY_OFF_BYTES = 1 << 20


def main() -> int:
    sys.path.extend(sys.argv[1:])  # where blake3 lies; the interpreter was started without site-packages
    from blake3 import blake3

    done = reported = 0
    begun = time.perf_counter()
    for index, (fd, size, units) in enumerate(json.load(sys.stdin)):
        if not size:
            continue
        with mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
            mapping.madvise(mmap.MADV_SEQUENTIAL)
            for number, (offset, length, expected) in enumerate(units):
                threads = blake3.AUTO if length >= THREADS_PAY_OFF_BYTES else 1
                with view[offset : offset + length] as part:
                    actual = blake3(part, max_threads=threads).hexdigest()
                if actual != expected:
                    print(json.dumps({"file": index, "unit": number, "actual": actual}), flush=True)
                    return 1
                done += length
                if done - reported >= REPORT_BYTES:
                    reported = done
                    print(json.dumps({"done": done}), flush=True)
    print(json.dumps({"done": done, "seconds": time.perf_counter() - begun}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
