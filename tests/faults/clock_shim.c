/* Another wall clock for one process, through LD_PRELOAD. The offset in nanoseconds is a native 8-byte integer at the
 * beginning of the file that $CLOCK_OFFSET names; it may change at any time. The monotonic clock is left alone. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static const volatile int64_t *offset;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *place = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0)
        close(file);
    if (place != MAP_FAILED)
        offset = place;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    /* the kernel itself: libc's clock_gettime is this one */
    int failed = (int)syscall(SYS_clock_gettime, clock, at);
    if (!failed && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t nanoseconds = at->tv_sec * SECOND + at->tv_nsec + *offset;
        at->tv_sec = nanoseconds / SECOND;
        at->tv_nsec = nanoseconds % SECOND;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
