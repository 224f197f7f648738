/* An allocator that retains exactly what it is told to: bytes from a mapping of its own, or blocks of malloc.
 *
 * Built by the tests as a shared object; retain() and hold() are called once an iteration. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const size_t REGION = 1ul << 30;
static char *region;
static size_t used;

/* Write the next n bytes of a mapping and keep them: n bytes a call, page by page. */
int retain(size_t n) {
    if (region == NULL) {
        region = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (region == MAP_FAILED || madvise(region, REGION, MADV_NOHUGEPAGE) != 0) return -1;
    }
    if (used + n > REGION) return -1;
    memset(region + used, 1, n);
    used += n;
    return 0;
}

/* Give all of it back to the kernel. */
int release(void) {
    int failed = region == NULL ? 0 : munmap(region, REGION);
    region = NULL;
    used = 0;
    return failed;
}

static void **blocks;
static size_t held, room;

/* Take a block of n bytes from malloc, write it, and keep it. */
int hold(size_t n) {
    if (held == room) {
        room = room ? room * 2 : 1 << 16;
        if ((blocks = realloc(blocks, room * sizeof *blocks)) == NULL) return -1;
    }
    if ((blocks[held] = malloc(n)) == NULL) return -1;
    memset(blocks[held++], 1, n);
    return 0;
}

/* Free every block but the last: the heap's end stays in use, so that nothing goes back to the kernel. */
void let_go(void) {
    for (size_t at = 0; at + 1 < held; at++) free(blocks[at]);
    held = 0;
}
