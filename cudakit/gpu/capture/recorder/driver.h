/* The queries of the driver that the recorder makes. */
#ifndef CK_DRIVER_H
#define CK_DRIVER_H

#include "driver_api.h"

/* Find the driver that the program has loaded, and its queries; NULL where one is missing. */
const driver_queries *driver(void);

#endif
