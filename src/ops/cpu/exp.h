/* exp(x) = 2^n e^r with n = round(x / ln 2), by a polynomial of degree 6 on |r| <= ln 2 / 2. Every
 * variant performs these operations in this order. Coefficients: Taylor's, whose error at the ends
 * of the interval is 1.2e-7 relative, one unit in the last place. */
#ifndef YARD_OPS_CPU_EXP_H
#define YARD_OPS_CPU_EXP_H

#define EXP_MIN -87.3f /* below: 0; the result would leave the normal numbers */
#define EXP_MAX 88.3f
#define EXP_LOG2E 0x1.715476p+0f
#define EXP_LN2_HIGH 0x1.62e4p-1f /* few bits, so that n * high is exact */
#define EXP_LN2_LOW 0x1.7f7d1cp-20f
#define EXP_C2 0x1p-1f
#define EXP_C3 0x1.555556p-3f
#define EXP_C4 0x1.555556p-5f
#define EXP_C5 0x1.111112p-7f
#define EXP_C6 0x1.6c16c2p-10f

#endif
