/* The records of CUPTI about kernels, copies and fills, and their translation to records of the trace. */
#ifndef CK_PROFILE_ACTIVITY_H
#define CK_PROFILE_ACTIVITY_H

#include <stdbool.h>
#include <stdint.h>

/* Make CUPTI use the recorder's buffers and clock. Return 0, or CUPTI's result code. Calls CUPTI: the recorder lock is
 * not held, as in all functions here. */
int activity_prepare(void);

/* Start recording. Return 0, or the result code of the first failure. */
int activity_enable(void);

/* Stop recording. Records of work that was enqueued before are still delivered. */
void activity_disable(void);

/* Write the completed records to the trace. */
void activity_flush(void);

/* Write all records to the trace. With ``count_unfinished``, work whose end is unknown is counted as lost. */
void activity_flush_unfinished(bool count_unfinished);

/* Remove the cached names: a module was unloaded, or the process was forked. */
void activity_forget_names(void);

/* Forget the buffers and names of the parent in the child of a fork. */
void activity_forked(void);

#endif
