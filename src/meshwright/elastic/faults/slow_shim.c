/* Lets the work of single processes take longer: preloaded into all processes of a run. A timer counts the CPU
 * time of the main thread; its signal handler sleeps in proportion. So waiting takes no longer, and other load
 * on the machine changes nothing. The table is a shared file that the injector writes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 64
#define BILLION 1000000000LL
#define SLICE_NS 2000000
#define SIGNAL (SIGRTMIN + 7)

struct slot {
  int64_t pid;
  int64_t permille; /* Sleep per CPU time, in thousandths. */
};

static volatile struct slot *table;
static volatile struct slot *own;
static volatile int64_t armed_pid;
static int64_t paid_ns;

__attribute__((constructor)) static void open_table(void) {
  const char *path = getenv("MESHWRIGHT_SLOW_TABLE");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *map = mmap(0, SLOTS * sizeof(struct slot), PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (map != MAP_FAILED) table = map;
}

static int64_t cpu_ns(void) {
  struct timespec used;
  syscall(SYS_clock_gettime, CLOCK_THREAD_CPUTIME_ID, &used);
  return used.tv_sec * BILLION + used.tv_nsec;
}

static void sleep_in_proportion(int number) {
  (void)number;
  int before = errno;
  int64_t sleep_ns = (cpu_ns() - paid_ns) * own->permille / 1000;
  struct timespec left = {sleep_ns / BILLION, sleep_ns % BILLION};
  while (sleep_ns > 0 && nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
  paid_ns = cpu_ns();
  errno = before;
}

static void arm_if_listed(void) {
  int64_t pid = getpid();
  if (!table || armed_pid == pid || syscall(SYS_gettid) != pid) return;
  for (int i = 0; i < SLOTS && table[i].pid; i++) {
    if (table[i].pid != pid) continue;
    struct sigaction action = {.sa_handler = sleep_in_proportion, .sa_flags = SA_RESTART};
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGNAL};
    struct itimerspec every = {{0, SLICE_NS}, {0, SLICE_NS}};
    timer_t timer;
    event._sigev_un._tid = (pid_t)pid;
    armed_pid = pid;
    own = &table[i];
    paid_ns = cpu_ns();
    sigaction(SIGNAL, &action, 0);
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) == 0) timer_settime(timer, 0, &every, 0);
    return;
  }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  arm_if_listed();
  return (int)syscall(SYS_clock_gettime, clock, now);
}
