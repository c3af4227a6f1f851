/* Writes down every call that changes files or folders under one folder, with what it writes, and every sync. Preloaded; begun by
   record_begin() through ctypes, also for the processes that are forked then. Each record is one write to a file opened for appending:
   a header of 8 native 64-bit integers (length of what follows, operation, inode, second inode, offset, size, process, 0), then two names that end
   in a zero byte, then data. What changes something is written down after it was done, a sync before and after. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, MKDIR, WRITE, SIZE, SYNC_BEGIN, SYNC_END, RENAME, EXCHANGE, UNLINK, LINK };

static char folder[PATH_MAX];
static size_t folder_length;
static int out = -1;

#define NEXT(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

void record_begin(const char *path, const char *log) {
    snprintf(folder, sizeof folder, "%s", path);
    folder_length = strlen(folder);
    out = NEXT(open64)(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

void record_end(void) {
    NEXT(close)(out);
    out = -1;
}

static void put(int operation, uint64_t inode, uint64_t other, uint64_t offset, uint64_t size, const char *name, const char *second,
                const void *data) {
    int before = errno;
    size_t names = strlen(name) + 1 + strlen(second) + 1;
    size_t extra = operation == WRITE ? size : 0;
    uint64_t head[8] = {names + extra, operation, inode, other, offset, size, getpid(), 0};
    struct iovec parts[4] = {{head, sizeof head},
                             {(void *)name, strlen(name) + 1},
                             {(void *)second, strlen(second) + 1},
                             {(void *)data, extra}};
    if (NEXT(writev)(out, parts, 4) != (ssize_t)(sizeof head + names + extra)) abort();
    errno = before;
}

/* The path as the kernel has it: of the folder that a name is in, or of a descriptor. */
static int absolute(int at, const char *path, char *result) {
    char joined[PATH_MAX], link[64];
    if (path[0] != '/' && at != AT_FDCWD) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t n = readlink(link, joined, sizeof joined - 1);
        if (n < 0) return 0;
        snprintf(joined + n, sizeof joined - n, "/%s", path);
        path = joined;
    }
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    size_t end = strlen(parent);
    while (end > 1 && parent[end - 1] == '/') parent[--end] = 0;
    char *slash = strrchr(parent, '/');
    const char *name = slash ? slash + 1 : parent;
    char real[PATH_MAX];
    if (!realpath(slash == parent ? "/" : slash ? (*slash = 0, parent) : ".", real)) return 0;
    return snprintf(result, PATH_MAX, "%s/%s", real, name) < PATH_MAX;
}

static int is_under(const char *path) {
    return out >= 0 && strncmp(path, folder, folder_length) == 0 && (path[folder_length] == '/' || !path[folder_length]);
}

static int fd_is_under(int fd) {
    if (out < 0 || fd == out) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return is_under(path);
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) == 0 ? found.st_ino : 0;
}

static uint64_t inode_at(const char *path) {
    struct stat found;
    return lstat(path, &found) == 0 ? found.st_ino : 0;
}

static uint64_t parent_of(const char *path) {
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    *strrchr(parent, '/') = 0;
    return inode_at(parent[0] ? parent : "/");
}

static const char *name_of(const char *path) { return strrchr(path, '/') + 1; }

/* --- files --- */

static int opened(int fd, int at, const char *path, int flags, int was_there) {
    char full[PATH_MAX];
    if (out < 0 || fd < 0 || !(flags & (O_CREAT | O_TRUNC)) || !absolute(at, path, full) || !is_under(full)) return fd;
    if ((flags & O_CREAT) && !was_there) {
        put(CREATE, parent_of(full), inode_of(fd), 0, 0, name_of(full), "", NULL);
    } else if (flags & O_TRUNC) {
        put(SIZE, inode_of(fd), 0, 0, 0, "", "", NULL);
    }
    return fd;
}

#define OPEN(name)                                                                              \
    int name(const char *path, int flags, ...) {                                                \
        va_list rest;                                                                           \
        va_start(rest, flags);                                                                  \
        mode_t mode = va_arg(rest, mode_t);                                                     \
        va_end(rest);                                                                           \
        int there = out >= 0 && (flags & O_CREAT) && faccessat(AT_FDCWD, path, F_OK, 0) == 0;   \
        return opened(NEXT(name)(path, flags, mode), AT_FDCWD, path, flags, there);             \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                            \
    int name(int at, const char *path, int flags, ...) {                                        \
        va_list rest;                                                                           \
        va_start(rest, flags);                                                                  \
        mode_t mode = va_arg(rest, mode_t);                                                     \
        va_end(rest);                                                                           \
        int there = out >= 0 && (flags & O_CREAT) && faccessat(at, path, F_OK, 0) == 0;         \
        return opened(NEXT(name)(at, path, flags, mode), at, path, flags, there);               \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t offset) {
    ssize_t done = NEXT(pwrite64)(fd, data, n, offset);
    if (done > 0 && fd_is_under(fd)) put(WRITE, inode_of(fd), 0, offset, done, "", "", data);
    return done;
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) { return pwrite64(fd, data, n, offset); }
ssize_t write(int fd, const void *data, size_t n) {
    int ours = fd_is_under(fd);
    off64_t offset = ours ? lseek64(fd, 0, SEEK_CUR) : 0;
    ssize_t done = NEXT(write)(fd, data, n);
    if (done > 0 && ours) put(WRITE, inode_of(fd), 0, offset, done, "", "", data);
    return done;
}
int ftruncate64(int fd, off64_t n) {
    int result = NEXT(ftruncate64)(fd, n);
    if (result == 0 && fd_is_under(fd)) put(SIZE, inode_of(fd), 0, 0, n, "", "", NULL);
    return result;
}
int ftruncate(int fd, off_t n) { return ftruncate64(fd, n); }
int fallocate64(int fd, int mode, off64_t offset, off64_t n) {
    int result = NEXT(fallocate64)(fd, mode, offset, n);
    if (result == 0 && fd_is_under(fd)) put(SIZE, inode_of(fd), 0, 0, offset + n, "", "", NULL);
    return result;
}
int fallocate(int fd, int mode, off_t offset, off_t n) { return fallocate64(fd, mode, offset, n); }

#define SYNC(name)                                                              \
    int name(int fd) {                                                          \
        int ours = fd_is_under(fd);                                             \
        if (ours) put(SYNC_BEGIN, inode_of(fd), 0, 0, 0, "", "", NULL);         \
        int result = NEXT(name)(fd);                                            \
        if (ours && result == 0) put(SYNC_END, inode_of(fd), 0, 0, 0, "", "", NULL); \
        return result;                                                          \
    }
SYNC(fsync)
SYNC(fdatasync)

/* --- folders --- */

static int made(int result, int at, const char *path) {
    char full[PATH_MAX];
    if (out >= 0 && result == 0 && absolute(at, path, full) && is_under(full))
        put(MKDIR, parent_of(full), inode_at(full), 0, 0, name_of(full), "", NULL);
    return result;
}
int mkdir(const char *path, mode_t mode) { return made(NEXT(mkdir)(path, mode), AT_FDCWD, path); }
int mkdirat(int at, const char *path, mode_t mode) { return made(NEXT(mkdirat)(at, path, mode), at, path); }

static int renamed(int result, int from_at, const char *from, int to_at, const char *to, int exchange) {
    char a[PATH_MAX], b[PATH_MAX];
    if (out >= 0 && result == 0 && absolute(from_at, from, a) && absolute(to_at, to, b) && is_under(b))
        put(exchange ? EXCHANGE : RENAME, parent_of(a), parent_of(b), 0, 0, name_of(a), name_of(b), NULL);
    return result;
}
int rename(const char *from, const char *to) { return renamed(NEXT(rename)(from, to), AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_at, const char *from, int to_at, const char *to) {
    return renamed(NEXT(renameat)(from_at, from, to_at, to), from_at, from, to_at, to, 0);
}
int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    return renamed(NEXT(renameat2)(from_at, from, to_at, to, flags), from_at, from, to_at, to, flags & RENAME_EXCHANGE);
}

int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    int result = NEXT(linkat)(from_at, from, to_at, to, flags);
    char full[PATH_MAX];
    if (out >= 0 && result == 0 && absolute(to_at, to, full) && is_under(full)) {
        put(LINK, parent_of(full), inode_at(full), 0, 0, name_of(full), "", NULL);
    }
    return result;
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

static int removed(int result, const char *full) {
    if (out >= 0 && result == 0 && is_under(full)) {
        put(UNLINK, parent_of(full), 0, 0, 0, name_of(full), "", NULL);
    }
    return result;
}
int unlink(const char *path) {
    char full[PATH_MAX] = "";
    if (out >= 0) absolute(AT_FDCWD, path, full);
    return removed(NEXT(unlink)(path), full);
}
int unlinkat(int at, const char *path, int flags) {
    char full[PATH_MAX] = "";
    if (out >= 0) absolute(at, path, full);
    return removed(NEXT(unlinkat)(at, path, flags), full);
}
int rmdir(const char *path) {
    char full[PATH_MAX] = "";
    if (out >= 0) absolute(AT_FDCWD, path, full);
    return removed(NEXT(rmdir)(path), full);
}
