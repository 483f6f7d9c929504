/* Which levels this processor supports. dispatch.c asks when the library selects a level, and processor/levels.c when it
 * is built. */
#ifndef ARMATURE_PROCESSOR_H
#define ARMATURE_PROCESSOR_H

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define MAYBE __attribute__((unused))

MAYBE static int always(void) { return 1; }

#if defined(__x86_64__)
MAYBE static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

MAYBE static int has_avx512bf16(void) { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

#ifdef ARMATURE_EMULATE_AMX
MAYBE static int has_amx(void) { return has_avx512bf16(); }
#elif defined(__linux__)
/* Linux, arch/x86/include/uapi/asm/prctl.h and Documentation/arch/x86/xstate.rst: a process asks for the registers once. */
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
/* CPUID leaf 7, EDX bits 22 and 24: products of bf16, and tiles. */
MAYBE static int has_amx(void) {
    unsigned eax, ebx, ecx, edx;
    if (!has_avx512bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx >> 22 & 5) != 5) return 0;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#else
MAYBE static int has_amx(void) { return 0; }
#endif

MAYBE static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

/* CPUID leaf 7, subleaf 1, EAX bit 4: compilers before GCC 13 have no name for it. */
MAYBE static int has_avxvnni(void) {
    unsigned eax = 7, ebx, ecx = 1, edx;
    if (!has_avx2()) return 0;
    unsigned most = 7, other = 0;
    __asm__ volatile("cpuid" : "+a"(other), "=b"(ebx), "=c"(ecx), "=d"(edx));
    most = other;
    ecx = 1;
    if (most < 7) return 0;
    __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    return eax >> 4 & 1;
}
#elif defined(__aarch64__) && defined(__linux__)
/* Linux, arch/arm64/include/uapi/asm/hwcap.h */
MAYBE static int has_dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; }
MAYBE static int has_i8mm(void) { return has_dotprod() && (getauxval(AT_HWCAP2) >> 13 & 3) == 3; } /* I8MM, BF16 */
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
static int asks(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value;
}
MAYBE static int has_dotprod(void) { return asks("hw.optional.arm.FEAT_DotProd"); }
MAYBE static int has_i8mm(void) { return has_dotprod() && asks("hw.optional.arm.FEAT_I8MM") && asks("hw.optional.arm.FEAT_BF16"); }
#endif

#endif
