/* wgmma for every width: d [64, N] (+)= a [64, K] . b [N, K]^T, both operands in shared memory as
 * descriptors, K = 32 bytes. keep 0 forgets the old d. A thread of the warpgroup holds rows
 * 16 warp + lane / 4 (+ 8) and columns 8 j + 2 (lane % 4) (+ 1): d[4 j + 2 (row + 8) + (col + 1)].
 *
 * The instruction names all its registers in one string, so the widths are put together from lists
 * of four registers, one for every eight columns. */
#ifndef YARD_OPS_CUDA_WGMMA_CUH
#define YARD_OPS_CUDA_WGMMA_CUH

/* clang-format off */
#define YARD_NAMES_8 "%0, %1, %2, %3"
#define YARD_NAMES_16 YARD_NAMES_8 ", " "%4, %5, %6, %7"
#define YARD_NAMES_24 YARD_NAMES_16 ", " "%8, %9, %10, %11"
#define YARD_NAMES_32 YARD_NAMES_24 ", " "%12, %13, %14, %15"
#define YARD_NAMES_40 YARD_NAMES_32 ", " "%16, %17, %18, %19"
#define YARD_NAMES_48 YARD_NAMES_40 ", " "%20, %21, %22, %23"
#define YARD_NAMES_56 YARD_NAMES_48 ", " "%24, %25, %26, %27"
#define YARD_NAMES_64 YARD_NAMES_56 ", " "%28, %29, %30, %31"
#define YARD_NAMES_72 YARD_NAMES_64 ", " "%32, %33, %34, %35"
#define YARD_NAMES_80 YARD_NAMES_72 ", " "%36, %37, %38, %39"
#define YARD_NAMES_88 YARD_NAMES_80 ", " "%40, %41, %42, %43"
#define YARD_NAMES_96 YARD_NAMES_88 ", " "%44, %45, %46, %47"
#define YARD_NAMES_104 YARD_NAMES_96 ", " "%48, %49, %50, %51"
#define YARD_NAMES_112 YARD_NAMES_104 ", " "%52, %53, %54, %55"
#define YARD_NAMES_120 YARD_NAMES_112 ", " "%56, %57, %58, %59"
#define YARD_NAMES_128 YARD_NAMES_120 ", " "%60, %61, %62, %63"
#define YARD_NAMES_136 YARD_NAMES_128 ", " "%64, %65, %66, %67"
#define YARD_NAMES_144 YARD_NAMES_136 ", " "%68, %69, %70, %71"
#define YARD_NAMES_152 YARD_NAMES_144 ", " "%72, %73, %74, %75"
#define YARD_NAMES_160 YARD_NAMES_152 ", " "%76, %77, %78, %79"
#define YARD_NAMES_168 YARD_NAMES_160 ", " "%80, %81, %82, %83"
#define YARD_NAMES_176 YARD_NAMES_168 ", " "%84, %85, %86, %87"
#define YARD_NAMES_184 YARD_NAMES_176 ", " "%88, %89, %90, %91"
#define YARD_NAMES_192 YARD_NAMES_184 ", " "%92, %93, %94, %95"
#define YARD_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define YARD_REGS_8 YARD_FOUR(0)
#define YARD_REGS_16 YARD_REGS_8, YARD_FOUR(4)
#define YARD_REGS_24 YARD_REGS_16, YARD_FOUR(8)
#define YARD_REGS_32 YARD_REGS_24, YARD_FOUR(12)
#define YARD_REGS_40 YARD_REGS_32, YARD_FOUR(16)
#define YARD_REGS_48 YARD_REGS_40, YARD_FOUR(20)
#define YARD_REGS_56 YARD_REGS_48, YARD_FOUR(24)
#define YARD_REGS_64 YARD_REGS_56, YARD_FOUR(28)
#define YARD_REGS_72 YARD_REGS_64, YARD_FOUR(32)
#define YARD_REGS_80 YARD_REGS_72, YARD_FOUR(36)
#define YARD_REGS_88 YARD_REGS_80, YARD_FOUR(40)
#define YARD_REGS_96 YARD_REGS_88, YARD_FOUR(44)
#define YARD_REGS_104 YARD_REGS_96, YARD_FOUR(48)
#define YARD_REGS_112 YARD_REGS_104, YARD_FOUR(52)
#define YARD_REGS_120 YARD_REGS_112, YARD_FOUR(56)
#define YARD_REGS_128 YARD_REGS_120, YARD_FOUR(60)
#define YARD_REGS_136 YARD_REGS_128, YARD_FOUR(64)
#define YARD_REGS_144 YARD_REGS_136, YARD_FOUR(68)
#define YARD_REGS_152 YARD_REGS_144, YARD_FOUR(72)
#define YARD_REGS_160 YARD_REGS_152, YARD_FOUR(76)
#define YARD_REGS_168 YARD_REGS_160, YARD_FOUR(80)
#define YARD_REGS_176 YARD_REGS_168, YARD_FOUR(84)
#define YARD_REGS_184 YARD_REGS_176, YARD_FOUR(88)
#define YARD_REGS_192 YARD_REGS_184, YARD_FOUR(92)

template <bool FP8, int N> struct wgmma;

#define YARD_WGMMA(FP8, TYPES, TRANSPOSE, N, A, B, P)                                              \
    template <> struct wgmma<FP8, N> {                                                             \
        static __device__ __forceinline__ void issue(float (&d)[N / 2], uint64_t a, uint64_t b,    \
                                                     int keep)                                     \
        {                                                                                          \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                            \
                         "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" YARD_NAMES_##N "}, " A   \
                         ", " B ", p, 1, 1" TRANSPOSE ";\n}"                                       \
                         : YARD_REGS_##N                                                           \
                         : "l"(a), "l"(b), "r"(keep));                                             \
        }                                                                                          \
    };
#define YARD_WGMMA_BOTH(N, A, B, P)                                                                \
    YARD_WGMMA(true, "k32.f32.e4m3.e4m3", "", N, A, B, P)                                          \
    YARD_WGMMA(false, "k16.f32.bf16.bf16", ", 0, 0", N, A, B, P)

YARD_WGMMA_BOTH(8, "%4", "%5", "%6")
YARD_WGMMA_BOTH(16, "%8", "%9", "%10")
YARD_WGMMA_BOTH(24, "%12", "%13", "%14")
YARD_WGMMA_BOTH(32, "%16", "%17", "%18")
YARD_WGMMA_BOTH(40, "%20", "%21", "%22")
YARD_WGMMA_BOTH(48, "%24", "%25", "%26")
YARD_WGMMA_BOTH(56, "%28", "%29", "%30")
YARD_WGMMA_BOTH(64, "%32", "%33", "%34")
YARD_WGMMA_BOTH(72, "%36", "%37", "%38")
YARD_WGMMA_BOTH(80, "%40", "%41", "%42")
YARD_WGMMA_BOTH(88, "%44", "%45", "%46")
YARD_WGMMA_BOTH(96, "%48", "%49", "%50")
YARD_WGMMA_BOTH(104, "%52", "%53", "%54")
YARD_WGMMA_BOTH(112, "%56", "%57", "%58")
YARD_WGMMA_BOTH(120, "%60", "%61", "%62")
YARD_WGMMA_BOTH(128, "%64", "%65", "%66")
YARD_WGMMA_BOTH(136, "%68", "%69", "%70")
YARD_WGMMA_BOTH(144, "%72", "%73", "%74")
YARD_WGMMA_BOTH(192, "%96", "%97", "%98")
/* clang-format on */

#endif
