/* A shared library standing in for libcudart: the calls that hwr.cuda makes, on a machine without a GPU.
 *
 * It pins nothing (unless told to) but keeps the books of the CUDA runtime: what is registered, what overlaps, the pending error
 * of each thread, and which calls a process may make after a fork. Build: cc -shared -fPIC -pthread, any soname; -DNO_LAST_ERROR leaves out
 * cudaGetLastError and cudaPeekAtLastError, -DNO_REGISTER leaves out cudaHostRegister.
 *
 * THE CONTROL FILE is `control` in the directory that the library was loaded from; it is read anew at each call, missing is empty.
 * One word and its value a line:
 *
 *   readonly_supported 0|1   attribute 113 (default 1); at 0 a call with the read-only flag (0x08) returns 801
 *   devices N                number of devices (default 1); at 0 every question about a device returns 100
 *   runtime N, driver N      versions (default 12080 and 13000)
 *   max_bytes N CODE         a registration of more than N bytes returns CODE (driver r580: 549755813887 2; Linux 6.11: 2146435072 1)
 *   corrupt CODE             a lost context: every call returns CODE, and consuming it does not help
 *   log PATH                 the log (default `calls` beside the control file), so that several processes can share one
 *   on CALL N ACTION...      what happens in the N-th CALL of this process, counted from 1; N may be `*`. CALL is register,
 *                            unregister, last_error, attribute, device or set_device. Actions are done in order:
 *                              fail CODE       return CODE without doing anything; of last_error: return CODE instead
 *                              sleep SECONDS   sleep in the call
 *                              spin SECONDS    burn a processor in the call; 0 is for ever
 *                              hang            never return
 *                              hold            wait in the call until a file `release` lies beside the control file, a minute at most
 *                              pin             take long-term pins of as many bytes of anonymous memory, through io_uring, until
 *                                              the range is unregistered: nr_foll_pin_acquired of /proc/vmstat moves
 *
 * THE TABLE of cudaHostRegister, in this order: 3 in a forked child; `corrupt`; 100 without a device; 1 for a null pointer, no bytes or an unknown
 * flag; `on register` fail; 801 for the read-only flag where it is not supported; 1 without that flag where a page is not writable;
 * 1 where a page is not mapped; `max_bytes`; 712 where it overlaps a registration. A range need not begin or end on a page.
 * cudaHostUnregister: 713 unless the address is where a registration begins; a registration stays when its unregistration failed.
 * A failed call leaves its code pending for its thread: cudaGetLastError returns and clears it, cudaPeekAtLastError only returns it,
 * a successful call leaves it as it is.
 *
 * THE LOG has two JSON objects a call, one line each, written at once: "enter" before anything is done, "exit" afterwards.
 * ns is CLOCK_BOOTTIME. `lost` counts registrations whose pages are no longer mapped as they were, which must never be.
 * At the end of a process that ends by itself comes one line "end" with the number of registrations left. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, MEMORY = 2, INITIALIZATION = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, OS_FAILED = 304,
       ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801 };
enum { READ_ONLY = 0x08, KNOWN_FLAGS = 0x0f, READ_ONLY_SUPPORTED = 113 };
enum { REGISTER, UNREGISTER, LAST_ERROR, ATTRIBUTE, DEVICE, SET_DEVICE, OTHERS, CALLS };
static const char *const WORDS[CALLS] = {"register", "unregister", "last_error", "attribute", "device", "set_device", "-"};

/* What /proc/self/maps says of a range. */
struct mapping { int mapped, writable; unsigned long inode; char perms[5]; };
struct range { unsigned long begin, bytes; struct mapping was; int ring; void *pinned; struct range *next; };
struct control { int readonly_supported, devices, runtime, driver, max_code, corrupt; unsigned long max_bytes; char log[PATH_MAX]; };
struct call { int kind; const char *name; unsigned long address, bytes; unsigned flags; struct mapping at; unsigned long number; };

static pthread_mutex_t books = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;
static unsigned long counts[CALLS];
static pid_t owner; /* the process that made the first call: CUDA does not survive a fork */
static __thread int pending, device;

/* Where we were loaded from. */
static void beside(char *path, const char *name) {
    Dl_info info;
    const char *file = dladdr((void *)&beside, &info) && info.dli_fname ? info.dli_fname : "./";
    const char *slash = strrchr(file, '/');
    snprintf(path, PATH_MAX, "%.*s%s", slash ? (int)(slash - file + 1) : 0, file, name);
}

static FILE *control_file(void) {
    char path[PATH_MAX];
    beside(path, "control");
    return fopen(path, "re");
}

static struct control read_control(void) {
    struct control now = {.readonly_supported = 1, .devices = 1, .runtime = 12080, .driver = 13000, .max_bytes = ULONG_MAX};
    char line[PATH_MAX + 8];
    FILE *file = control_file();
    beside(now.log, "calls");
    if (file == NULL) return now;
    while (fgets(line, sizeof line, file)) {
        sscanf(line, "readonly_supported %d", &now.readonly_supported);
        sscanf(line, "devices %d", &now.devices);
        sscanf(line, "runtime %d", &now.runtime);
        sscanf(line, "driver %d", &now.driver);
        sscanf(line, "max_bytes %lu %d", &now.max_bytes, &now.max_code);
        sscanf(line, "corrupt %d", &now.corrupt);
        sscanf(line, "log %4095[^\n]", now.log);
    }
    fclose(file);
    return now;
}

/* Copy what is to happen in this call; empty for nothing. The line that names the number comes before the one for all. */
static void actions_of(const struct call *call, char *actions, size_t room) {
    char line[512], word[32], number[32];
    FILE *file = control_file();
    int at, exact = 0;
    actions[0] = '\0';
    if (file == NULL) return;
    while (!exact && fgets(line, sizeof line, file)) {
        if (sscanf(line, "on %31s %31s %n", word, number, &at) < 2 || strcmp(word, WORDS[call->kind]) != 0) continue;
        exact = strcmp(number, "*") != 0;
        if (exact && strtoul(number, NULL, 10) != call->number) { exact = 0; continue; }
        snprintf(actions, room, "%s", line + at);
    }
    fclose(file);
}

struct vma { unsigned long first, last, inode; char perms[5]; };
struct maps { struct vma *all; size_t number; };

static struct maps read_maps(void) {
    struct maps maps = {NULL, 0};
    size_t room = 0;
    char line[PATH_MAX + 128];
    FILE *file = fopen("/proc/self/maps", "re");
    while (file != NULL && fgets(line, sizeof line, file)) {
        if (maps.number == room) maps.all = realloc(maps.all, (room = room ? room * 2 : 512) * sizeof *maps.all);
        struct vma *one = &maps.all[maps.number];
        maps.number += sscanf(line, "%lx-%lx %4s %*x %*x:%*x %lu", &one->first, &one->last, one->perms, &one->inode) == 4;
    }
    if (file != NULL) fclose(file);
    return maps;
}

/* Look at every page of a range at once: writable and of one inode only if all are. */
static struct mapping look(const struct maps *maps, unsigned long begin, unsigned long bytes) {
    struct mapping all = {0};
    unsigned long wanted = begin, end = begin + bytes;
    for (size_t at = 0; at < maps->number && wanted < end; at++) {
        const struct vma *one = &maps->all[at];
        if (one->last <= wanted) continue;
        if (one->first > wanted) break;
        if (wanted == begin) { all.writable = 1; all.inode = one->inode; memcpy(all.perms, one->perms, sizeof all.perms); }
        if (one->perms[1] != 'w') all.writable = 0;
        if (one->inode != all.inode) all.inode = 0;
        wanted = one->last;
    }
    all.mapped = end > begin && wanted >= end;
    return all;
}

static struct mapping look_now(unsigned long begin, unsigned long bytes) {
    struct maps maps = read_maps();
    struct mapping is = look(&maps, begin, bytes);
    free(maps.all);
    return is;
}

static unsigned long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return now.tv_sec * 1000000000ul + now.tv_nsec;
}

static void tell(const char *format, ...) {
    char line[1024];
    struct control control = read_control();
    int length, file = open(control.log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    va_list values;
    if (file < 0) return;
    va_start(values, format);
    length = vsnprintf(line, sizeof line, format, values);
    va_end(values);
    if (write(file, line, length) != length) abort(); /* a log that lies is worse than none */
    close(file);
}

/* Count registrations, and those whose mapping went away or was replaced under them; the caller holds the books. */
static void count(int *held, int *lost) {
    struct maps maps = read_maps();
    *held = *lost = 0;
    for (struct range *one = ranges; one; one = one->next) {
        struct mapping is = look(&maps, one->begin, one->bytes);
        ++*held;
        if (!is.mapped || is.inode != one->was.inode || strcmp(is.perms, one->was.perms) != 0) ++*lost;
    }
    free(maps.all);
}

static void enter(struct call *call, int kind, const char *name) {
    call->kind = kind;
    call->name = name;
    pthread_mutex_lock(&books);
    if (owner == 0) owner = getpid();
    call->number = ++counts[kind];
    pthread_mutex_unlock(&books);
    tell("{\"phase\":\"enter\",\"call\":\"%s\",\"number\":%lu,\"pid\":%d,\"tid\":%ld,\"ns\":%lu,\"address\":%lu,\"bytes\":%lu,\"flags\":%u,"
         "\"aligned\":%s,\"mapped\":%s,\"perms\":\"%s\"}\n", name, call->number, getpid(), syscall(SYS_gettid), now_ns(), call->address, call->bytes,
         call->flags, (call->address | call->bytes) % sysconf(_SC_PAGESIZE) ? "false" : "true", call->at.mapped ? "true" : "false", call->at.perms);
}

/* End a call: a failure stays pending, except that of a question about it. */
static int leave(const struct call *call, int result) {
    int held, lost;
    if (result != OK && call->kind != LAST_ERROR) pending = result;
    pthread_mutex_lock(&books);
    count(&held, &lost);
    pthread_mutex_unlock(&books);
    tell("{\"phase\":\"exit\",\"call\":\"%s\",\"number\":%lu,\"pid\":%d,\"tid\":%ld,\"ns\":%lu,\"address\":%lu,\"bytes\":%lu,\"flags\":%u,"
         "\"result\":%d,\"registered\":%d,\"lost\":%d}\n", call->name, call->number, getpid(), syscall(SYS_gettid), now_ns(), call->address, call->bytes,
         call->flags, result, held, lost);
    return result;
}

static void wait_for(double seconds) {
    struct timespec rest = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR) { }
}

static void spin_for(double seconds) {
    unsigned long until = now_ns() + (unsigned long)(seconds * 1e9);
    while (seconds == 0 || now_ns() < until) { }
}

static void hold_back(void) {
    char path[PATH_MAX];
    unsigned long until = now_ns() + 60000000000ul; /* so that a test that fails does not leave it here */
    beside(path, "release");
    while (access(path, F_OK) != 0 && now_ns() < until) wait_for(0.001);
}

/* Pin anonymous memory for long: a ring's registered buffers are pinned with FOLL_LONGTERM, a gibibyte at most each. */
static int pin(struct range *range) {
    struct io_uring_params parameters = {0};
    unsigned long parts = (range->bytes + (1ul << 30) - 1) >> 30;
    struct iovec *vectors = calloc(parts, sizeof *vectors);
    long done;
    range->pinned = mmap(NULL, range->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    range->ring = (int)syscall(__NR_io_uring_setup, 4, &parameters);
    if (range->pinned == MAP_FAILED || range->ring < 0 || vectors == NULL) { free(vectors); return MEMORY; }
    for (unsigned long at = 0; at < parts; at++) {
        unsigned long rest = range->bytes - (at << 30);
        vectors[at].iov_base = (char *)range->pinned + (at << 30);
        vectors[at].iov_len = rest < 1ul << 30 ? rest : 1ul << 30;
    }
    done = syscall(__NR_io_uring_register, range->ring, IORING_REGISTER_BUFFERS, vectors, parts);
    free(vectors);
    return done == 0 ? OK : OS_FAILED;
}

static void unpin(struct range *range) {
    if (range->ring >= 0) {
        syscall(__NR_io_uring_register, range->ring, IORING_UNREGISTER_BUFFERS, NULL, 0);
        close(range->ring);
    }
    if (range->pinned != NULL && range->pinned != MAP_FAILED) munmap(range->pinned, range->bytes);
}

/* Do what the control file says for this call. Returns -1 to go on, else the result of the call. */
static int act(const struct call *call, struct range *range) {
    char actions[512], *rest = actions, *word;
    actions_of(call, actions, sizeof actions);
    while ((word = strsep(&rest, " \n")) != NULL) {
        if (strcmp(word, "fail") == 0) return atoi(strsep(&rest, " \n"));
        if (strcmp(word, "sleep") == 0) wait_for(atof(strsep(&rest, " \n")));
        if (strcmp(word, "spin") == 0) spin_for(atof(strsep(&rest, " \n")));
        if (strcmp(word, "hang") == 0) for (;;) pause();
        if (strcmp(word, "hold") == 0) hold_back();
        if (strcmp(word, "pin") == 0 && range != NULL) {
            int result = pin(range);
            if (result != OK) return result;
        }
    }
    return -1;
}

static int usable(const struct control *control) {
    if (getpid() != owner) return INITIALIZATION;
    if (control->corrupt) return control->corrupt;
    return control->devices > 0 ? OK : NO_DEVICE;
}

/* The table, once the range is known to be wanted; the caller holds the books. */
static int admissible(const struct control *control, const struct call *call) {
    if ((call->flags & READ_ONLY) && !control->readonly_supported) return NOT_SUPPORTED;
    if (!(call->flags & READ_ONLY) && !call->at.writable) return INVALID;
    if (!call->at.mapped) return INVALID;
    if (call->bytes > control->max_bytes) return control->max_code;
    for (struct range *one = ranges; one; one = one->next)
        if (call->address < one->begin + one->bytes && one->begin < call->address + call->bytes) return ALREADY_REGISTERED;
    return OK;
}

#ifndef NO_REGISTER
int cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    struct call call = {.address = (unsigned long)pointer, .bytes = bytes, .flags = flags, .at = look_now((unsigned long)pointer, bytes)};
    struct control control;
    struct range *range = calloc(1, sizeof *range);
    int result;
    *range = (struct range){call.address, bytes, call.at, -1, NULL, NULL};
    enter(&call, REGISTER, "cudaHostRegister");
    control = read_control();
    result = usable(&control);
    if (result == OK && (pointer == NULL || bytes == 0 || (flags & ~KNOWN_FLAGS))) result = INVALID;
    if (result == OK) {
        int acted = act(&call, range); /* without the books: other threads go on */
        if (acted >= 0) result = acted;
    }
    pthread_mutex_lock(&books);
    if (result == OK) result = admissible(&control, &call);
    if (result == OK) { range->next = ranges; ranges = range; }
    pthread_mutex_unlock(&books);
    if (result != OK) { unpin(range); free(range); }
    return leave(&call, result);
}
#endif

int cudaHostUnregister(void *pointer) {
    struct call call = {.address = (unsigned long)pointer};
    struct control control;
    struct range *found = NULL;
    int result;
    pthread_mutex_lock(&books);
    for (struct range *one = ranges; one; one = one->next)
        if (one->begin == call.address) { call.bytes = one->bytes; call.at = look_now(one->begin, one->bytes); }
    pthread_mutex_unlock(&books);
    enter(&call, UNREGISTER, "cudaHostUnregister");
    control = read_control();
    result = usable(&control);
    if (result == OK) {
        int acted = act(&call, NULL);
        if (acted >= 0) result = acted;
    }
    pthread_mutex_lock(&books);
    for (struct range **one = &ranges; result == OK && *one && found == NULL; one = &(*one)->next)
        if ((*one)->begin == call.address) { found = *one; *one = found->next; break; }
    pthread_mutex_unlock(&books);
    if (result == OK && found == NULL) result = NOT_REGISTERED;
    if (found != NULL) { unpin(found); free(found); }
    return leave(&call, result);
}

int cudaHostGetFlags(unsigned *flags, void *pointer) {
    struct call call = {.address = (unsigned long)pointer};
    int result = INVALID;
    enter(&call, OTHERS, "cudaHostGetFlags");
    pthread_mutex_lock(&books);
    for (struct range *one = ranges; one; one = one->next)
        if (one->begin <= call.address && call.address < one->begin + one->bytes) { *flags = READ_ONLY; result = OK; }
    pthread_mutex_unlock(&books);
    return leave(&call, result);
}

#ifndef NO_LAST_ERROR
static int ask(const char *name, int consume) {
    struct call call = {0};
    struct control control = read_control();
    int acted, result = control.corrupt ? control.corrupt : pending;
    enter(&call, consume ? LAST_ERROR : OTHERS, name);
    acted = act(&call, NULL);
    if (consume) pending = OK;
    else call.kind = LAST_ERROR; /* so that what is only looked at is not counted, and stays pending */
    return leave(&call, acted >= 0 ? acted : result);
}

int cudaGetLastError(void) { return ask("cudaGetLastError", 1); }
int cudaPeekAtLastError(void) { return ask("cudaPeekAtLastError", 0); }
#endif

/* Answer a question with one number. */
static int answer(int kind, const char *name, int *to, int value, int needs_device) {
    struct call call = {0};
    struct control control = read_control();
    int result, acted;
    enter(&call, kind, name);
    acted = act(&call, NULL);
    result = acted >= 0 ? acted : needs_device ? usable(&control) : OK;
    if (result == OK) *to = value;
    return leave(&call, result);
}

int cudaGetDevice(int *to) { return answer(DEVICE, "cudaGetDevice", to, device, 1); }
int cudaGetDeviceCount(int *to) { *to = 0; return answer(OTHERS, "cudaGetDeviceCount", to, read_control().devices, 1); }
int cudaRuntimeGetVersion(int *to) { return answer(OTHERS, "cudaRuntimeGetVersion", to, read_control().runtime, 0); }
int cudaDriverGetVersion(int *to) { return answer(OTHERS, "cudaDriverGetVersion", to, read_control().driver, 0); }

int cudaDeviceGetAttribute(int *to, int attribute, int of) {
    struct control control = read_control();
    struct call call = {.flags = (unsigned)attribute};
    int result, acted;
    enter(&call, ATTRIBUTE, "cudaDeviceGetAttribute");
    acted = act(&call, NULL);
    result = acted >= 0 ? acted : usable(&control);
    if (result == OK && (of < 0 || of >= control.devices)) result = INVALID_DEVICE;
    if (result == OK && attribute != READ_ONLY_SUPPORTED) result = INVALID;
    if (result == OK) *to = control.readonly_supported;
    return leave(&call, result);
}

int cudaSetDevice(int to) {
    struct control control = read_control();
    struct call call = {.flags = (unsigned)to};
    int result, acted;
    enter(&call, SET_DEVICE, "cudaSetDevice");
    acted = act(&call, NULL);
    result = acted >= 0 ? acted : usable(&control);
    if (result == OK && (to < 0 || to >= control.devices)) result = INVALID_DEVICE;
    if (result == OK) device = to;
    return leave(&call, result);
}

int cudaDeviceSynchronize(void) { int ignored; return answer(OTHERS, "cudaDeviceSynchronize", &ignored, 0, 1); }

/* Names and texts as the runtime has them. */
static const struct { int code; const char *name, *text; } ERRORS[] = {
    {OK, "cudaSuccess", "no error"},
    {INVALID, "cudaErrorInvalidValue", "invalid argument"},
    {MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {INITIALIZATION, "cudaErrorInitializationError", "initialization error"},
    {35, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {201, "cudaErrorDeviceUninitialized", "invalid device context"},
    {OS_FAILED, "cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {ALREADY_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {800, "cudaErrorNotPermitted", "operation not permitted"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
    {803, "cudaErrorSystemDriverMismatch", "system has unsupported display driver / cuda driver combination"},
    {999, "cudaErrorUnknown", "unknown error"},
};

const char *cudaGetErrorName(int code) {
    for (size_t at = 0; at < sizeof ERRORS / sizeof *ERRORS; at++) if (ERRORS[at].code == code) return ERRORS[at].name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(int code) {
    for (size_t at = 0; at < sizeof ERRORS / sizeof *ERRORS; at++) if (ERRORS[at].code == code) return ERRORS[at].text;
    return "unrecognized error code";
}

__attribute__((destructor)) static void end(void) {
    int held, lost;
    if (owner != getpid()) return; /* unused, or a forked child */
    count(&held, &lost);
    tell("{\"phase\":\"end\",\"call\":\"-\",\"pid\":%d,\"tid\":%ld,\"ns\":%lu,\"registered\":%d,\"lost\":%d}\n", getpid(), syscall(SYS_gettid), now_ns(), held, lost);
}
