// Runs a kernel over a grid: one fiber per thread, simd and threadgroup operations as meeting points, and every rule of
// the meeting checked. Compiled without instrumentation also beside a ThreadSanitizer build of the kernel.

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "metal_shim.h"

#ifdef SHIM_RACES
#include <sanitizer/tsan_interface.h>
#endif

extern "C" void shim_kernel(void* const* buffers, const shim_attributes& attributes);

namespace {

constexpr size_t THREADGROUP_MEMORY = 32768;
constexpr size_t STACK = 32 << 10;
constexpr size_t ARENA = THREADGROUP_MEMORY;
constexpr size_t GUARD = 1 << 20;
constexpr int MAX_THREADS = 1024;
constexpr int MAX_SHARED = 64;
constexpr size_t MAX_VALUE = 16;

enum State { READY, AT_SIMD, AT_BARRIER, DONE };

struct Meeting {
  int operation, flags, line, column;
  bool operator==(const Meeting& other) const {
    return operation == other.operation && line == other.line && column == other.column;
  }
};

struct Lane {
  State state;
  Meeting meeting;
  bool started;
  uint number, parity;
  shim_attributes attributes;
  ucontext_t context;
  jmp_buf resume;
#ifdef SHIM_RACES
  void* fiber;
#endif
};

struct Simdgroup {
  alignas(16) unsigned char values[2][SIMD_WIDTH * MAX_VALUE];
  uint lanes, simd_barriers;
};

Lane lanes[MAX_THREADS];
Simdgroup simdgroups[MAX_THREADS / SIMD_WIDTH];
char barrier_clock[2], simd_clock[MAX_THREADS / SIMD_WIDTH][2];
uint barriers;
unsigned char *stacks, *arena;
ucontext_t scheduler;
jmp_buf scheduler_resume;
Lane* current;
void* const* arguments;
unsigned char reduction_order[SIMD_WIDTH];
unsigned char* shared[MAX_SHARED];
size_t shared_total;
unsigned char poison;
char fault[512];
uint64_t random_state;

void set_fault(const char* format, ...) {
  if (fault[0]) {
    return;
  }
  va_list list;
  va_start(list, format);
  vsnprintf(fault, sizeof fault, format, list);
  va_end(list);
}

uint next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint(random_state >> 16);
}

// Order 0 is forward, 1 reverse, anything else a seed.
template <typename T>
void arrange(T* items, int n, int order) {
  for (int i = 0; i < n; i++) {
    items[i] = T(i);
  }
  if (order == 1) {
    std::reverse(items, items + n);
  } else if (order > 1) {
    for (int i = n - 1; i > 0; i--) {
      std::swap(items[i], items[next_random() % (i + 1)]);
    }
  }
}

// No memcpy: the sanitizer would take the runtime's copies for the kernel's.
void copy_bytes(volatile unsigned char* to, const volatile unsigned char* from, size_t n) {
  for (size_t i = 0; i < n; i++) {
    to[i] = from[i];
  }
}

unsigned char* map_memory(size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  return static_cast<unsigned char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0));
}

#ifdef SHIM_RACES
void* scheduler_fiber;
void leave() {
  __tsan_switch_to_fiber(scheduler_fiber, __tsan_switch_to_fiber_no_sync);
  swapcontext(&current->context, &scheduler);
}
#else
// swapcontext makes system calls: it only starts a fiber.
void leave() {
  if (_setjmp(current->resume) == 0) {
    _longjmp(scheduler_resume, 1);
  }
}
#endif

void lane_main() {
  shim_kernel(arguments, current->attributes);
  current->state = DONE;
  leave();
  abort();
}

void run_lane(Lane& lane) {
  current = &lane;
  bool first = !lane.started;
  lane.started = true;
  if (first) {
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = stacks + lane.number * STACK;
    lane.context.uc_stack.ss_size = STACK;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, lane_main, 0);
  }
#ifdef SHIM_RACES
  if (first) {
    lane.fiber = __tsan_create_fiber(0);
  }
  __tsan_switch_to_fiber(lane.fiber, __tsan_switch_to_fiber_no_sync);
  swapcontext(&scheduler, &lane.context);
#else
  if (_setjmp(scheduler_resume) == 0) {
    if (first) {
      setcontext(&lane.context);
    }
    _longjmp(lane.resume, 1);
  }
#endif
}

void publish(char* clock) {
#ifdef SHIM_RACES
  __tsan_release(clock);
#endif
}
void observe(char* clock) {
#ifdef SHIM_RACES
  __tsan_acquire(clock);
#endif
}

const char* name(int operation) {
  static const char* names[] = {"simd_sum", "simd_max", "simd_min", "simd_or", "simd_and",
                                "simd_shuffle", "simd_any", "simd_all", "simd_prefix_exclusive_sum"};
  return operation < 0 ? "simdgroup_barrier" : names[operation];
}

void describe(char* text, size_t n, const Lane& lane) {
  if (lane.state == DONE) {
    snprintf(text, n, "thread %u has returned", lane.number);
  } else if (lane.state == AT_BARRIER) {
    snprintf(text, n, "thread %u waits at the threadgroup_barrier of line %d", lane.number, lane.meeting.line);
  } else {
    snprintf(text, n, "thread %u is at %s of line %d", lane.number, name(lane.meeting.operation), lane.meeting.line);
  }
}

void fault_between(const char* kind, const Lane& one, const Lane& other) {
  char a[128], b[128];
  describe(a, sizeof a, one);
  describe(b, sizeof b, other);
  set_fault("%s: %s while %s", kind, a, b);
}

// Runs one simdgroup until all its lanes wait at a threadgroup barrier or have returned.
void run_simdgroup(uint group, const unsigned char* order) {
  Simdgroup& simdgroup = simdgroups[group];
  Lane* first = lanes + group * SIMD_WIDTH;
  for (;;) {
    for (int i = 0; i < SIMD_WIDTH; i++) {
      if (order[i] < simdgroup.lanes && first[order[i]].state == READY) {
        run_lane(first[order[i]]);
        if (fault[0]) {
          return;
        }
      }
    }
    Lane* waiting = nullptr;
    for (uint i = 0; i < simdgroup.lanes && !waiting; i++) {
      waiting = first[i].state == AT_SIMD ? first + i : nullptr;
    }
    if (!waiting) {
      return;
    }
    for (uint i = 0; i < simdgroup.lanes; i++) {
      if (first[i].state != AT_SIMD || !(first[i].meeting == waiting->meeting)) {
        fault_between("divergent simd operation", *waiting, first[i]);
        return;
      }
    }
    for (uint i = 0; i < simdgroup.lanes; i++) {
      first[i].state = READY;
    }
    simdgroup.simd_barriers += waiting->meeting.operation < 0;
  }
}

void run_threadgroup(int threads, int order) {
  barriers = 0;
  shared_total = 0;
#ifdef SHIM_RACES
  // New memory each time: threadgroups share neither stacks nor threadgroup memory.
  stacks = map_memory(size_t(threads) * STACK);
  arena = map_memory(ARENA);
#endif
  for (size_t i = 0; i < ARENA; i++) {
    const_cast<volatile unsigned char*>(arena)[i] = poison;
  }
  for (int i = 0; i < MAX_SHARED; i++) {
    shared[i] = nullptr;
  }
  int groups = (threads + SIMD_WIDTH - 1) / SIMD_WIDTH;
  for (int g = 0; g < groups; g++) {
    simdgroups[g].lanes = std::min(SIMD_WIDTH, threads - g * SIMD_WIDTH);
    simdgroups[g].simd_barriers = 0;
  }
  unsigned char group_order[MAX_THREADS / SIMD_WIDTH], lane_order[SIMD_WIDTH];
  for (;;) {
    arrange(group_order, groups, order);
    for (int g = 0; g < groups; g++) {
      arrange(lane_order, SIMD_WIDTH, order);
      run_simdgroup(group_order[g], lane_order);
      if (fault[0]) {
        return;
      }
    }
    Lane *done = nullptr, *waiting = nullptr;
    for (int i = 0; i < threads; i++) {
      (lanes[i].state == DONE ? done : waiting) = lanes + i;
    }
    if (!waiting) {
      return;
    }
    if (done) {
      fault_between("early return before a barrier", *done, *waiting);
      return;
    }
    for (int i = 0; i < threads; i++) {
      if (!(lanes[i].meeting == waiting->meeting)) {
        fault_between("barrier in divergent control flow", lanes[i], *waiting);
        return;
      }
      lanes[i].state = READY;
    }
    barriers++;
  }
}

#ifndef SHIM_RACES
sigjmp_buf crash;
void on_crash(int, siginfo_t* info, void*) {
  set_fault("invalid memory access by thread %u of threadgroup (%u, %u, %u), address %p: out of bounds of a buffer",
            current->number, current->attributes.threadgroup_position_in_grid.x,
            current->attributes.threadgroup_position_in_grid.y, current->attributes.threadgroup_position_in_grid.z,
            info->si_addr);
  siglongjmp(crash, 1);
}
#endif

// A copy of a buffer between two inaccessible stretches; flush with the front one or with the back one.
struct Guarded {
  unsigned char *base, *data;
  size_t mapped, bytes;

  Guarded(size_t bytes, bool at_end) : bytes(bytes) {
    size_t page = size_t(sysconf(_SC_PAGESIZE));
    size_t body = std::max<size_t>(1, (bytes + page - 1) / page) * page;
    mapped = body + 2 * GUARD;
    base = static_cast<unsigned char*>(mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base + GUARD, body, PROT_READ | PROT_WRITE);
    data = base + GUARD + (at_end ? (body - bytes) & ~size_t(15) : 0);
  }
};

}  // namespace

extern "C" {

void* shim_shared(int slot, size_t bytes) {
  if (!shared[slot]) {
    shared[slot] = arena + shared_total;
    shared_total += (bytes + 15) / 16 * 16;
    if (shared_total > THREADGROUP_MEMORY) {
      set_fault("threadgroup memory: %zu bytes declared, the limit is %zu", shared_total, THREADGROUP_MEMORY);
      leave();
    }
  }
  return shared[slot];
}

void shim_barrier(int flags, int line, int column) {
  char* clock = &barrier_clock[barriers % 2];
  if (flags) {
    publish(clock);
  }
  current->state = AT_BARRIER;
  current->meeting = {-1, flags, line, column};
  leave();
  if (flags) {
    observe(clock);
  }
}

void shim_simdgroup_barrier(int flags, int line, int column) {
  uint group = current->number / SIMD_WIDTH;
  char* clock = &simd_clock[group][simdgroups[group].simd_barriers % 2];
  if (flags) {
    publish(clock);
  }
  current->state = AT_SIMD;
  current->meeting = {-1, flags, line, column};
  leave();
  if (flags) {
    observe(clock);
  }
}

const unsigned char* shim_exchange(int operation, const void* value, size_t bytes, int line, int column) {
  Simdgroup& simdgroup = simdgroups[current->number / SIMD_WIDTH];
  // Two sets of values: a lane may reach the next operation before another has read this one's.
  unsigned char* values = simdgroup.values[current->parity];
  current->parity ^= 1;
  copy_bytes(values + current->number % SIMD_WIDTH * bytes, static_cast<const unsigned char*>(value), bytes);
  current->state = AT_SIMD;
  current->meeting = {operation, 0, line, column};
  leave();
  return values;
}

// g++ calls these where the kernel leaves an array, misaligns a vector, overshifts or divides by zero.
struct Place {
  const char* file;
  uint line, column;
};
void undefined(const Place* place, const char* what) {
  set_fault("%s by thread %u at %s:%u", what, current->number, place->file, place->line);
  leave();
}
void __ubsan_handle_out_of_bounds(Place* place, uintptr_t) { undefined(place, "array index out of bounds"); }
void __ubsan_handle_type_mismatch_v1(Place* place, uintptr_t) { undefined(place, "misaligned access"); }
void __ubsan_handle_shift_out_of_bounds(Place* place, uintptr_t, uintptr_t) { undefined(place, "shift out of range"); }
void __ubsan_handle_divrem_overflow(Place* place, uintptr_t, uintptr_t) { undefined(place, "division by zero"); }

uint shim_lanes() { return simdgroups[current->number / SIMD_WIDTH].lanes; }
uint shim_lane() { return current->number % SIMD_WIDTH; }
const unsigned char* shim_reduction_order() { return reduction_order; }

// Runs the grid over copies of the buffers and copies them back; the fault's text, or an empty one.
const char* shim_run(void** buffers, const size_t* sizes, int count, const uint* grid, const uint* threads, int order,
                     int reduction, int fill, int at_end) {
  fault[0] = 0;
  poison = static_cast<unsigned char>(fill);
  random_state = 0x9e3779b97f4a7c15ull + uint64_t(order) + (uint64_t(reduction) << 32);
  arrange(reduction_order, SIMD_WIDTH, reduction);
  if (!stacks) {
    stacks = map_memory(MAX_THREADS * STACK);
    arena = map_memory(ARENA);
  }
  // Both outlive the run: to the sanitizer, freeing is a write that no barrier orders.
  auto& guarded = *new std::vector<Guarded>;
  auto& views = *new std::vector<void*>;
  for (int i = 0; i < count; i++) {
    guarded.emplace_back(sizes[i], at_end);
    views.push_back(guarded.back().data);
    copy_bytes(guarded.back().data, static_cast<unsigned char*>(buffers[i]), sizes[i]);
  }
  arguments = views.data();

  uint size[3], groups[3];
  for (int i = 0; i < 3; i++) {
    size[i] = std::min(threads[i], grid[i]);
    groups[i] = (grid[i] + size[i] - 1) / size[i];
  }
  if (size[0] * size[1] * size[2] > MAX_THREADS) {
    set_fault("threadgroup of %u threads, the limit is %d", size[0] * size[1] * size[2], MAX_THREADS);
  }

#ifdef SHIM_RACES
  scheduler_fiber = __tsan_get_current_fiber();
#else
  static unsigned char* signal_stack = static_cast<unsigned char*>(malloc(64 << 10));
  stack_t alternate = {signal_stack, 0, 64 << 10}, old_stack;
  struct sigaction action = {}, old_segv, old_bus;
  action.sa_sigaction = on_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaltstack(&alternate, &old_stack);
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  if (sigsetjmp(crash, 1) == 0)
#endif
  {
    std::vector<uint> group_order(groups[0] * groups[1] * groups[2]);
    arrange(group_order.data(), int(group_order.size()), order);
    for (uint g : group_order) {
      uint at[3] = {g % groups[0], g / groups[0] % groups[1], g / groups[0] / groups[1]};
      uint here[3];
      for (int i = 0; i < 3; i++) {
        here[i] = std::min(size[i], grid[i] - at[i] * size[i]);
      }
      int n = int(here[0] * here[1] * here[2]);
      for (int i = 0; i < n && !fault[0]; i++) {
        Lane& lane = lanes[i];
        uint x = i % here[0], y = i / here[0] % here[1], z = i / here[0] / here[1];
        lane.state = READY;
        lane.started = false;
        lane.number = uint(i);
        lane.parity = 0;
        lane.attributes = {{at[0] * size[0] + x, at[1] * size[1] + y, at[2] * size[2] + z},
                           {x, y, z},
                           {at[0], at[1], at[2]},
                           {grid[0], grid[1], grid[2]},
                           {here[0], here[1], here[2]},
                           {groups[0], groups[1], groups[2]},
                           uint(i),
                           uint(i % SIMD_WIDTH),
                           uint(i / SIMD_WIDTH),
                           uint((n + SIMD_WIDTH - 1) / SIMD_WIDTH),
                           SIMD_WIDTH};
      }
      if (!fault[0]) {
        run_threadgroup(n, order);
      }
#ifdef SHIM_RACES
      for (int i = 0; i < n; i++) {
        if (lanes[i].started) {
          __tsan_destroy_fiber(lanes[i].fiber);
        }
      }
#endif
      if (fault[0]) {
        break;
      }
    }
  }
#ifndef SHIM_RACES
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);
#endif
  for (int i = 0; i < count; i++) {
    copy_bytes(static_cast<unsigned char*>(buffers[i]), guarded[i].data, sizes[i]);
  }
#ifndef SHIM_RACES
  for (Guarded& g : guarded) {
    munmap(g.base, g.mapped);
  }
  delete &guarded;
  delete &views;
#endif
  return fault;
}

}  // extern "C"

#ifdef SHIM_RACES
// ThreadSanitizer needs a program of its own. The file holds: count, grid, threads, sizes, then the buffers.
int main(int, char** arguments_of_main) {
  FILE* file = fopen(arguments_of_main[1], "rb");
  uint64_t head[7];
  if (!file || fread(head, sizeof head, 1, file) != 1) {
    return 2;
  }
  std::vector<uint64_t> sizes(head[0]);
  std::vector<void*> buffers;
  if (fread(sizes.data(), 8, sizes.size(), file) != sizes.size()) {
    return 2;
  }
  for (uint64_t size : sizes) {
    buffers.push_back(malloc(size ? size : 1));
    if (fread(buffers.back(), 1, size, file) != size) {
      return 2;
    }
  }
  uint grid[3] = {uint(head[1]), uint(head[2]), uint(head[3])};
  uint threads[3] = {uint(head[4]), uint(head[5]), uint(head[6])};
  const char* text = shim_run(buffers.data(), reinterpret_cast<size_t*>(sizes.data()), int(sizes.size()), grid, threads,
                              0, 0, 0xff, 0);
  printf("%s", text);
  fflush(stdout);
  _exit(0);
}
#endif
