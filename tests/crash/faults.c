/* Lets the n-th call that changes a file fail. Preloaded; armed by fault_arm() through ctypes. Calls are counted where they concern files
   under one folder: write, pwrite64, fsync, fdatasync, ftruncate64, fallocate64, flock (but to unlock), open64 with O_CREAT, rename, renameat2, unlink. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long seen, fired;
static long at = -1;
static int with_errno;
static char folder[PATH_MAX];
static char last[32];

void fault_arm(long n, int error, const char *path) {
    atomic_store(&seen, 0);
    atomic_store(&fired, 0);
    with_errno = error;
    snprintf(folder, sizeof folder, "%s", path);
    at = n;
}

long fault_seen(void) { return atomic_load(&seen); }
long fault_fired(void) { return atomic_load(&fired); }
const char *fault_last(void) { return last; }

static int hits(const char *path, const char *call) {
    if (at < 0 || strncmp(path, folder, strlen(folder)) != 0) return 0;
    if (atomic_fetch_add(&seen, 1) != at) return 0;
    atomic_store(&fired, 1);
    snprintf(last, sizeof last, "%s", call);
    errno = with_errno;
    return 1;
}

static int hits_fd(int fd, const char *call) {
    if (at < 0) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return hits(path, call);
}

#define NEXT(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t offset) {
    return hits_fd(fd, "pwrite") ? -1 : NEXT(pwrite64)(fd, data, n, offset);
}
ssize_t write(int fd, const void *data, size_t n) {
    return fd > 2 && hits_fd(fd, "write") ? -1 : NEXT(write)(fd, data, n);
}
int fsync(int fd) { return hits_fd(fd, "fsync") ? -1 : NEXT(fsync)(fd); }
int fdatasync(int fd) { return hits_fd(fd, "fdatasync") ? -1 : NEXT(fdatasync)(fd); }
int ftruncate64(int fd, off64_t n) { return hits_fd(fd, "ftruncate") ? -1 : NEXT(ftruncate64)(fd, n); }
int fallocate64(int fd, int mode, off64_t at, off64_t n) {
    return hits_fd(fd, "fallocate") ? -1 : NEXT(fallocate64)(fd, mode, at, n);
}
int fallocate(int fd, int mode, off_t at, off_t n) { return fallocate64(fd, mode, at, n); }
int flock(int fd, int operation) {
    return !(operation & LOCK_UN) && hits_fd(fd, "flock") ? -1 : NEXT(flock)(fd, operation);
}
int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    return hits(to, "rename") ? -1 : NEXT(renameat2)(from_at, from, to_at, to, flags);
}
int rename(const char *from, const char *to) { return hits(to, "rename") ? -1 : NEXT(rename)(from, to); }
int unlink(const char *path) { return hits(path, "unlink") ? -1 : NEXT(unlink)(path); }

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if ((flags & O_CREAT) && hits(path, "open")) return -1;
    return NEXT(open64)(path, flags, mode);
}
