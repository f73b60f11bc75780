/* Makes chosen calls on files below a folder fail, end short, or kill their process.
 *
 * Preloaded into everything that a run starts. ROTA_FAULTS_BELOW is the folder, ROTA_FAULTS_STATE a file that all
 * processes map, in which calls are counted, and ROTA_FAULTS_LOG a file outside of the folder that tells what was done.
 * ROTA_FAULTS are the faults, separated by ';', each as
 *
 *     ROLES CALLS PATH FIRST COUNT ACTION
 *
 * where ROLES and CALLS are lists with commas between them, PATH is a pattern for the path below the folder, and ACTION
 * is errno=N, done-errno=N (the call is made and said to have failed), short, kill-before or kill-after. Of the calls
 * that match, counted over all processes, those from FIRST on (the first is 1) are met, COUNT of them. With
 * ROTA_FAULTS_TRACE every call is told.
 *
 * Calls go to the kernel directly, so that no symbol is looked up: other libraries may be preloaded beside this one. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_FAULTS 16
#define PAGE 4096

struct state { /* in the mapped file */
    _Atomic uint32_t over; /* no fault befalls anything any more */
    _Atomic uint32_t met[MOST_FAULTS];
    _Atomic uint32_t fired[MOST_FAULTS];
};

enum action { ERRNO, DONE_ERRNO, SHORT, KILL_BEFORE, KILL_AFTER };

struct fault {
    char roles[64], calls[128], path[256];
    uint32_t first, count;
    enum action action;
    int number; /* of the error */
};

static char below[PATH_MAX], log_path[PATH_MAX], role[32];
static size_t below_length;
static int tracing, fault_count;
static struct fault faults[MOST_FAULTS];
static struct state *state;

/* ---- the kernel ---- */

static long now_(long number, long a, long b, long c, long d, long e, long f) { return syscall(number, a, b, c, d, e, f); }
#define CALL1(n, a) now_(n, (long)(a), 0, 0, 0, 0, 0)
#define CALL2(n, a, b) now_(n, (long)(a), (long)(b), 0, 0, 0, 0)
#define CALL3(n, a, b, c) now_(n, (long)(a), (long)(b), (long)(c), 0, 0, 0)
#define CALL4(n, a, b, c, d) now_(n, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)
#define CALL5(n, a, b, c, d, e) now_(n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), 0)
#define CALL6(n, a, b, c, d, e, f) now_(n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

static void tell(const char *what, const char *call, const char *path) {
    char line[PATH_MAX + 128];
    int length = snprintf(line, sizeof line, "%s %s %s %d %s\n", what, role, call, (int)getpid(), path);
    int handle = (int)CALL4(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (handle < 0) return;
    if (length > 0) CALL3(SYS_write, handle, line, length);
    CALL1(SYS_close, handle);
}

/* ---- what is to happen ---- */

static void configure(const char *as) {
    const char *folder = getenv("ROTA_FAULTS_BELOW"), *file = getenv("ROTA_FAULTS_STATE"), *spec = getenv("ROTA_FAULTS");
    const char *log = getenv("ROTA_FAULTS_LOG");
    if (state != NULL) munmap(state, PAGE);
    state = NULL;
    fault_count = 0;
    if (as == NULL || folder == NULL || file == NULL || log == NULL) return;
    snprintf(role, sizeof role, "%s", as);
    snprintf(below, sizeof below, "%s", folder);
    snprintf(log_path, sizeof log_path, "%s", log);
    below_length = strlen(below);
    tracing = getenv("ROTA_FAULTS_TRACE") != NULL;
    while (spec != NULL && *spec != '\0' && fault_count < MOST_FAULTS) {
        struct fault *one = &faults[fault_count];
        char action[32];
        int used = 0;
        int found = sscanf(spec, "%63s %127s %255s %u %u %31[^; ]%n", one->roles, one->calls, one->path, &one->first,
                           &one->count, action, &used);
        if (found != 6) {
            fprintf(stderr, "ROTA_FAULTS cannot be read: %s\n", spec);
            _exit(99);
        }
        one->number = 0;
        if (sscanf(action, "errno=%d", &one->number) == 1) one->action = ERRNO;
        else if (sscanf(action, "done-errno=%d", &one->number) == 1) one->action = DONE_ERRNO;
        else if (strcmp(action, "short") == 0) one->action = SHORT;
        else if (strcmp(action, "kill-before") == 0) one->action = KILL_BEFORE;
        else one->action = KILL_AFTER;
        fault_count++;
        spec += used;
        while (*spec == ';' || *spec == ' ') spec++;
    }
    int handle = (int)CALL4(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC, 0);
    if (handle < 0) return;
    void *mapped = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    CALL1(SYS_close, handle);
    state = mapped == MAP_FAILED ? NULL : mapped;
    tell("began", "-", "-");
}

/* A process that was forked instead of started says what it is; NULL: nothing befalls it. */
void rota_faults_begin(const char *as) { configure(as); }

__attribute__((constructor)) static void begin(int count, char **arguments) {
    const char *as = NULL;
    for (int i = 1; i < count && as == NULL; i++) {
        if (strstr(arguments[i], "rota.runtime.worker") != NULL) as = "worker";
        else if (strcmp(arguments[i], "-m") == 0 && i + 1 < count && strcmp(arguments[i + 1], "rota") == 0) as = "controller";
    }
    configure(as);
}

static int listed(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *at = list; at != NULL; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, name, length) == 0 && (at[length] == ',' || at[length] == '\0')) return 1;
    return 0;
}

/* The path below the folder, or NULL. */
static const char *inside(char *path) {
    if (strncmp(path, below, below_length) != 0) return NULL;
    if (path[below_length] == '\0') return ".";
    return path[below_length] == '/' ? path + below_length + 1 : NULL;
}

static int link_of(int handle, char *path) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", handle);
    long length = CALL4(SYS_readlinkat, AT_FDCWD, name, path, PATH_MAX - 1);
    if (length <= 0) return 0;
    path[length] = '\0';
    char *end = strstr(path, " (deleted)");
    if (end != NULL) *end = '\0';
    return path[0] == '/';
}

/* What befalls a call on a path; NULL is nothing. */
static const struct fault *met(const char *call, char *whole) {
    const char *path = inside(whole);
    if (path == NULL) return NULL;
    if (tracing) tell("call", call, path);
    if (atomic_load(&state->over)) return NULL;
    const struct fault *found = NULL;
    for (int i = 0; i < fault_count; i++) {
        const struct fault *one = &faults[i];
        if (!listed(one->roles, role) || !listed(one->calls, call) || fnmatch(one->path, path, 0) != 0) continue;
        uint32_t number = atomic_fetch_add(&state->met[i], 1) + 1;
        if (found != NULL || number < one->first || number - one->first >= one->count) continue;
        found = one;
        if (atomic_fetch_add(&state->fired[i], 1) < 64) tell("fault", call, path);
    }
    return found;
}

static const struct fault *met_handle(const char *call, int handle) {
    char path[PATH_MAX];
    if (state == NULL) return NULL;
    int before = errno;
    const struct fault *found = link_of(handle, path) ? met(call, path) : NULL;
    errno = before;
    return found;
}

static const struct fault *met_path(const char *call, int folder, const char *name) {
    char path[2 * PATH_MAX + 2];
    if (state == NULL || name == NULL) return NULL;
    int before = errno;
    if (name[0] == '/') snprintf(path, sizeof path, "%s", name);
    else {
        if (folder == AT_FDCWD) {
            if (CALL2(SYS_getcwd, path, PATH_MAX) < 0) path[0] = '\0';
        } else if (!link_of(folder, path)) path[0] = '\0';
        size_t length = strlen(path);
        snprintf(path + length, sizeof path - length, "/%s", name);
    }
    const struct fault *found = met(call, path);
    errno = before;
    return found;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Makes the call that `expression` is, with what befalls it. */
#define WITH(found, expression)                                                  \
    do {                                                                         \
        const struct fault *fault_ = (found);                                    \
        if (fault_ != NULL && fault_->action == KILL_BEFORE) die();              \
        if (fault_ != NULL && fault_->action == ERRNO) return failed(fault_);    \
        long result_ = (expression);                                             \
        if (fault_ != NULL && fault_->action == KILL_AFTER) die();               \
        if (fault_ != NULL && fault_->action == DONE_ERRNO) return failed(fault_); \
        return result_;                                                          \
    } while (0)

static long failed(const struct fault *fault) {
    errno = fault->number;
    return -1;
}

/* Half of the bytes, in whole pages where there are some: what is read and written past the page cache is in pages. */
static size_t shortened(const struct fault *fault, size_t size) {
    if (fault == NULL || fault->action != SHORT || size < 2) return size;
    return size >= 2 * PAGE ? size / 2 / PAGE * PAGE : size % PAGE == 0 ? size : size / 2;
}

static int shortened_pieces(const struct fault *fault, const struct iovec *from, int count, struct iovec *to) {
    if (count > 8) count = 8; /* a short result by itself */
    memcpy(to, from, sizeof *from * (size_t)count);
    if (fault != NULL && fault->action == SHORT && count > 0) {
        if (count > 1) return count - 1;
        to[0].iov_len = shortened(fault, to[0].iov_len);
    }
    return count;
}

/* ---- what is written and read ---- */

ssize_t write(int handle, const void *from, size_t size) {
    const struct fault *found = met_handle("write", handle);
    WITH(found, CALL3(SYS_write, handle, from, shortened(found, size)));
}

ssize_t writev(int handle, const struct iovec *from, int count) {
    struct iovec pieces[8];
    const struct fault *found = met_handle("write", handle);
    if (found == NULL) return CALL3(SYS_writev, handle, from, count);
    count = shortened_pieces(found, from, count, pieces);
    WITH(found, CALL3(SYS_writev, handle, pieces, count));
}

ssize_t pwrite64(int handle, const void *from, size_t size, off64_t place) {
    const struct fault *found = met_handle("pwrite", handle);
    WITH(found, CALL4(SYS_pwrite64, handle, from, shortened(found, size), place));
}

ssize_t pwrite(int handle, const void *from, size_t size, off_t place) { return pwrite64(handle, from, size, place); }

ssize_t pwritev64(int handle, const struct iovec *from, int count, off64_t place) {
    struct iovec pieces[8];
    const struct fault *found = met_handle("pwrite", handle);
    if (found == NULL) return CALL5(SYS_pwritev, handle, from, count, place, 0);
    count = shortened_pieces(found, from, count, pieces);
    WITH(found, CALL5(SYS_pwritev, handle, pieces, count, place, 0));
}

ssize_t pwritev(int handle, const struct iovec *from, int count, off_t place) {
    return pwritev64(handle, from, count, place);
}

ssize_t pwritev64v2(int handle, const struct iovec *from, int count, off64_t place, int flags) {
    const struct fault *found = met_handle("pwrite", handle);
    WITH(found, CALL6(SYS_pwritev2, handle, from, count, place, 0, flags));
}

ssize_t pwritev2(int handle, const struct iovec *from, int count, off_t place, int flags) {
    return pwritev64v2(handle, from, count, place, flags);
}

ssize_t read(int handle, void *into, size_t size) {
    const struct fault *found = met_handle("read", handle);
    WITH(found, CALL3(SYS_read, handle, into, shortened(found, size)));
}

ssize_t pread64(int handle, void *into, size_t size, off64_t place) {
    const struct fault *found = met_handle("pread", handle);
    WITH(found, CALL4(SYS_pread64, handle, into, shortened(found, size), place));
}

ssize_t pread(int handle, void *into, size_t size, off_t place) { return pread64(handle, into, size, place); }

ssize_t preadv64(int handle, const struct iovec *into, int count, off64_t place) {
    struct iovec pieces[8];
    const struct fault *found = met_handle("pread", handle);
    if (found == NULL) return CALL5(SYS_preadv, handle, into, count, place, 0);
    count = shortened_pieces(found, into, count, pieces);
    WITH(found, CALL5(SYS_preadv, handle, pieces, count, place, 0));
}

ssize_t preadv(int handle, const struct iovec *into, int count, off_t place) {
    return preadv64(handle, into, count, place);
}

ssize_t preadv64v2(int handle, const struct iovec *into, int count, off64_t place, int flags) {
    if (flags == 0) return preadv64(handle, into, count, place);
    WITH(met_handle("pread", handle), CALL6(SYS_preadv2, handle, into, count, place, 0, flags));
}

ssize_t preadv2(int handle, const struct iovec *into, int count, off_t place, int flags) {
    return preadv64v2(handle, into, count, place, flags);
}

/* ---- what is made durable, and how long files are ---- */

int fsync(int handle) { WITH(met_handle("fsync", handle), CALL1(SYS_fsync, handle)); }

int fdatasync(int handle) { WITH(met_handle("fsync", handle), CALL1(SYS_fdatasync, handle)); }

int ftruncate64(int handle, off64_t size) { WITH(met_handle("ftruncate", handle), CALL2(SYS_ftruncate, handle, size)); }

int ftruncate(int handle, off_t size) { return ftruncate64(handle, size); }

int truncate64(const char *path, off64_t size) {
    WITH(met_path("ftruncate", AT_FDCWD, path), CALL2(SYS_truncate, path, size));
}

int truncate(const char *path, off_t size) { return truncate64(path, size); }

int fallocate64(int handle, int mode, off64_t place, off64_t size) {
    WITH(met_handle("ftruncate", handle), CALL4(SYS_fallocate, handle, mode, place, size));
}

int fallocate(int handle, int mode, off_t place, off_t size) { return fallocate64(handle, mode, place, size); }

int posix_fallocate64(int handle, off64_t place, off64_t size) { /* returns its error */
    int before = errno;
    int error = fallocate64(handle, 0, place, size) < 0 ? errno : 0;
    errno = before;
    return error;
}

int posix_fallocate(int handle, off_t place, off_t size) { return posix_fallocate64(handle, place, size); }

/* ---- names ---- */

static int open_(int folder, const char *path, int flags, mode_t mode) {
    const char *call = "open";
    if (state != NULL && flags & O_CREAT) { /* what is there already needs no room */
        struct stat facts;
        int before = errno;
        if (fstatat(folder, path, &facts, AT_SYMLINK_NOFOLLOW) != 0) call = "create";
        errno = before;
    }
    WITH(met_path(call, folder, path), CALL4(SYS_openat, folder, path, flags, mode));
}

#define MODE(flags, mode)                                           \
    mode_t mode = 0;                                                \
    if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) {    \
        va_list rest;                                               \
        va_start(rest, flags);                                      \
        mode = va_arg(rest, mode_t);                                \
        va_end(rest);                                               \
    }

int open(const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_(AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_(folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_(folder, path, flags, mode);
}

int __open_2(const char *path, int flags) { return open_(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return open_(AT_FDCWD, path, flags, 0); }
int __openat_2(int folder, const char *path, int flags) { return open_(folder, path, flags, 0); }
int __openat64_2(int folder, const char *path, int flags) { return open_(folder, path, flags, 0); }

int creat(const char *path, mode_t mode) { return open_(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned int flags) {
    WITH(met_path("rename", from_folder, from), CALL5(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    return renameat2(from_folder, from, to_folder, to, 0);
}

int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int mkdirat(int folder, const char *path, mode_t mode) {
    WITH(met_path("mkdir", folder, path), CALL3(SYS_mkdirat, folder, path, mode));
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int folder, const char *path, int flags) {
    WITH(met_path("unlink", folder, path), CALL3(SYS_unlinkat, folder, path, flags));
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }

int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int flock(int handle, int operation) { WITH(met_handle("flock", handle), CALL2(SYS_flock, handle, operation)); }
