/* Put before the sources of the engine (gcc -include): limits are small, memory is counted, and may
   be refused. */
#ifndef PYCOLL_ENGINE_HOOKS_H
#define PYCOLL_ENGINE_HOOKS_H

#include <stdlib.h>

#define PC_CLOSED_IDENTS 2
#define PC_MOST_UNOPENED 10
#define PC_SHORT_HEADER 40
#define PC_RUN_WINDOW 2
#define PC_SCRATCH_WORTH 1
#ifdef __SANITIZE_ADDRESS__
#define PC_NO_FREE_LIST /* AddressSanitizer sees who touches a message that is gone */
#else
#define PC_SCRATCH_KEPT ((size_t)2048)
#endif

void *scarce_malloc(size_t nbytes);
void *scarce_calloc(size_t count, size_t nbytes);
void counted_free(void *memory);
#define malloc scarce_malloc
#define calloc scarce_calloc
#define free counted_free
#endif
