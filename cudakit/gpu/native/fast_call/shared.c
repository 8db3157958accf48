#include "shared.h"

driver_functions driver;
attribute_names names;
int accepted_device_type = 2;

bool enter_context(handle context, bool *was_current)
{
    handle current_context = NULL;
    *was_current = !driver.get_context(&current_context) && current_context == context;
    return *was_current || !driver.push_context(context);
}

void leave_context(bool was_current)
{
    handle context;
    if (!was_current)
        driver.pop_context(&context);
}
