/* The callbacks about contexts, modules and graph nodes. A graph node has the call site of its capture. */
#ifndef CK_PROFILE_RESOURCES_H
#define CK_PROFILE_RESOURCES_H

#include <stdbool.h>

#include "profile/cupti_api.h"

/* Enable the callbacks of contexts, modules and graph nodes. Return 0, or the result code of the first failure. */
int resources_enable(CUpti_SubscriberHandle subscriber, bool enable);

/* Handle a callback about a context, module or graph node. */
void resources_on_callback(uint32_t cbid, const CUpti_ResourceData *data);

/* Forget the nodes of the parent in the child of a fork. */
void resources_forked(void);

#endif
