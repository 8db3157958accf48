#include "machine_code.h"

int machine_code_unseen(const void *cubin, size_t bytes,
                        void (*found)(void *to, const char *function, const char *what), void *to)
{
    (void)cubin, (void)bytes, (void)found, (void)to;
    return 0;
}
