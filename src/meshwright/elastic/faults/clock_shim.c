/* Shifts the wall clock of single processes: preloaded into all processes of a run. The table is a shared file
 * that the injector writes. Monotonic clocks are not changed: they do not jump on a real machine either. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 64
#define BILLION 1000000000LL

struct slot {
  int64_t pid;
  int64_t by_ns;
};

static volatile struct slot *table;

__attribute__((constructor)) static void open_table(void) {
  const char *path = getenv("MESHWRIGHT_CLOCK_TABLE");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *map = mmap(0, SLOTS * sizeof(struct slot), PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (map != MAP_FAILED) table = map;
}

static int64_t shift_ns(void) {
  if (!table) return 0;
  int64_t pid = getpid();
  for (int i = 0; i < SLOTS && table[i].pid; i++)
    if (table[i].pid == pid) return table[i].by_ns;
  return 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = (int)syscall(SYS_clock_gettime, clock, now);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    int64_t ns = now->tv_sec * BILLION + now->tv_nsec + shift_ns();
    now->tv_sec = ns / BILLION;
    now->tv_nsec = ns % BILLION;
  }
  return status;
}

int gettimeofday(struct timeval *now, void *zone) {
  (void)zone;
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *result) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (result) *result = exact.tv_sec;
  return exact.tv_sec;
}
