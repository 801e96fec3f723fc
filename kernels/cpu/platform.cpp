// Linux has all of it; elsewhere the operating system places the threads.
#include "platform.h"

#include <algorithm>
#include <cstdint>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif
#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#ifdef __aarch64__
#include <sys/auxv.h>
#endif
#endif

namespace edgellm::platform {

bool has_dot_products() {
#if defined(__aarch64__) && defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
    return true;  // from the first Mac with such a processor on
#elif defined(__aarch64__) && defined(_WIN32)
    constexpr DWORD ARM_V82_DP = 43;  // older SDKs have no name for it
    return IsProcessorFeaturePresent(ARM_V82_DP) != 0;
#else
    return false;
#endif
}

#if defined(__x86_64__) && defined(__linux__)
namespace {

sigjmp_buf before_illegal;
thread_local bool tests_tiles = false;

// Another thread's instruction ends the process, as it does at any other time.
void leave_illegal(int) {
    if (tests_tiles) siglongjmp(before_illegal, 1);
    signal(SIGILL, SIG_DFL);
}

}  // namespace

bool allow_tiles(bool (*test)()) {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0) return false;
    struct sigaction leave {}, old {};
    leave.sa_handler = leave_illegal;
    sigset_t illegal, blocked;
    sigemptyset(&illegal);
    sigaddset(&illegal, SIGILL);
    pthread_sigmask(SIG_UNBLOCK, &illegal, &blocked);
    sigaction(SIGILL, &leave, &old);
    tests_tiles = true;
    const bool passed = sigsetjmp(before_illegal, 1) == 0 && test();
    tests_tiles = false;
    sigaction(SIGILL, &old, nullptr);
    pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
    return passed;
}
#else
bool allow_tiles(bool (*)()) { return false; }
#endif

int cores() {
#ifdef __linux__
    cpu_set_t usable;
    if (sched_getaffinity(0, sizeof usable, &usable) == 0) return CPU_COUNT(&usable);
#endif
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int current_core() {
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
}

#ifdef __linux__
bool keep_off(int core, const std::vector<std::thread::native_handle_type>& threads) {
    cpu_set_t others;
    if (sched_getaffinity(0, sizeof others, &others) != 0 || CPU_COUNT(&others) < 2) return false;
    CPU_CLR(core, &others);
    for (pthread_t thread : threads) pthread_setaffinity_np(thread, sizeof others, &others);
    return true;
}
#else
bool keep_off(int, const std::vector<std::thread::native_handle_type>&) { return false; }
#endif

void give_back(const void* memory, size_t bytes) {
#ifdef _WIN32
    (void)memory, (void)bytes;
#else
    static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
    if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
#endif
}

long process() {
#ifdef _WIN32
    return 1;  // there is no fork()
#else
    return getpid();
#endif
}

}  // namespace edgellm::platform
