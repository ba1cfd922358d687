/* Tells the static analyser what it cannot see from one file: yard_fail() returns its status, which
 * is never YARD_OK. Included before each file by check_tidy.sh only, never by a build. */
#include <yard/status.h>

#define yard_fail(err, status, ...) ((void)yard_fail(err, status, __VA_ARGS__), (status))
