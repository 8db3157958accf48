/* A library that uses NVTX's headers, and calls every function that begins or ends a range or makes a mark. */
#if __has_include(<nvtx3/nvToolsExt.h>) /* not where the file is only linted */
#include <nvtx3/nvToolsExt.h>
#include <string.h>

#define WIDE L"wide \u00e9\u6f22\U0001f600"

static nvtxEventAttributes_t event(int type, const void *message)
{
    nvtxEventAttributes_t attributes;
    memset(&attributes, 0, sizeof attributes);
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = type;
    memcpy(&attributes.message, &message, sizeof message);
    return attributes;
}

/* Return the number of results that differ from the expected ones. */
int call_all(void)
{
    const nvtxEventAttributes_t ascii = event(NVTX_MESSAGE_TYPE_ASCII, "event"),
                                wide = event(NVTX_MESSAGE_TYPE_UNICODE, L"wide event \u00bd"),
                                unnamed = event(NVTX_MESSAGE_UNKNOWN, NULL);
    int wrong = 0;
    nvtxMarkA("ascii");
    nvtxMarkW(WIDE);
    nvtxMarkEx(&ascii);
    wrong += nvtxRangePushA("ascii") != 0;
    wrong += nvtxRangePushW(WIDE) != 1;
    wrong += nvtxRangePushEx(&wide) != 2;
    wrong += nvtxRangePushEx(&unnamed) != 3;
    for (int depth = 3; depth >= 0; depth--)
        wrong += nvtxRangePop() != depth;
    wrong += nvtxRangePop() >= 0;

    nvtxDomainHandle_t domain = nvtxDomainCreateA("domain"), other = nvtxDomainCreateW(L"wide domain");
    const nvtxRangeId_t started[] = {nvtxRangeStartA("ascii"), nvtxRangeStartW(WIDE), nvtxRangeStartEx(&ascii)};
    const nvtxRangeId_t in_domain = nvtxDomainRangeStartEx(domain, &ascii);
    for (int i = 0; i < 3; i++)
        nvtxRangeEnd(started[i]);
    nvtxDomainRangeEnd(domain, in_domain);
    nvtxRangeEnd(in_domain + 1000); /* no such range */

    nvtxStringHandle_t registered = nvtxDomainRegisterStringA(domain, "registered");
    wrong += registered != nvtxDomainRegisterStringA(domain, "registered");
    const nvtxEventAttributes_t of_string = event(NVTX_MESSAGE_TYPE_REGISTERED, registered);
    const nvtxEventAttributes_t of_wide =
        event(NVTX_MESSAGE_TYPE_REGISTERED, nvtxDomainRegisterStringW(domain, L"registered wide"));
    const nvtxEventAttributes_t wide_event = event(NVTX_MESSAGE_TYPE_UNICODE, WIDE);
    nvtxDomainMarkEx(domain, &of_string);
    wrong += nvtxDomainRangePushEx(other, &wide_event) != 0;
    wrong += nvtxDomainRangePushEx(domain, &of_wide) != 0;
    wrong += nvtxDomainRangePop(domain) != 0;
    wrong += nvtxDomainRangePop(other) != 0;
    nvtxDomainDestroy(domain);
    nvtxDomainDestroy(other);
    return wrong;
}
#endif
