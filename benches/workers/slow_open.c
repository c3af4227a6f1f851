/* Opens files of a checkpoint late, as a network file system does: to be preloaded. DCP_RS_BENCH_OPEN_US is how late, in microseconds. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void wait_for(const char *path)
{
    static const char ending[] = ".safetensors";
    const size_t length = path ? strlen(path) : 0, wanted = sizeof ending - 1;
    const char *microseconds = getenv("DCP_RS_BENCH_OPEN_US");
    if (microseconds && length > wanted && !strcmp(path + length - wanted, ending)) {
        const struct timespec late = {0, 1000L * atol(microseconds)};
        nanosleep(&late, NULL);
    }
}

#define OPENER(name, parameters, arguments)                    \
    int name parameters                                        \
    {                                                          \
        static int(*real) parameters;                          \
        if (!real)                                             \
            *(void **)&real = dlsym(RTLD_NEXT, #name);         \
        mode_t mode = 0;                                       \
        if (flags & (O_CREAT | O_TMPFILE)) {                   \
            va_list more;                                      \
            va_start(more, flags);                             \
            mode = va_arg(more, mode_t);                       \
            va_end(more);                                      \
        }                                                      \
        wait_for(path);                                        \
        return real arguments;                                 \
    }

OPENER(open, (const char *path, int flags, ...), (path, flags, mode))
OPENER(open64, (const char *path, int flags, ...), (path, flags, mode))
OPENER(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
OPENER(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
