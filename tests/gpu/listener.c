/* An NVTX tool that writes each call to standard output, one line per call.
 *
 * Uses the tables of nvtx3/nvtxDetail/nvtxTypes.h (NVTX 3): a program that finds this library in
 * NVTX_INJECTION64_PATH lets it replace NVTX's functions.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { CALLBACKS = 1, CORE2 = 5 };
enum { MARK = 1, PUSH = 4, POP = 5, REGISTER_STRING = 10, CREATE_DOMAIN = 12 };
enum { PAYLOAD_INT64 = 2, MESSAGE_REGISTERED = 3 };

typedef void (*Function)(void);

typedef struct {
    size_t size;
    int (*functions)(int module, Function ***table, unsigned *count);
} Callbacks;

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    int64_t payload;
    int32_t message_type;
    const char *message;
} Attributes;

static void print_call(const char *what, const char *domain, const Attributes *event)
{
    printf("%s %s %s", what, domain, event->message_type == MESSAGE_REGISTERED ? event->message : "?");
    if (event->payload_type == PAYLOAD_INT64)
        printf(" %lld", (long long)event->payload);
    printf("\n");
    fflush(stdout);
}

static void mark(const char *domain, const Attributes *event)
{
    print_call("mark", domain, event);
}

static int push(const char *domain, const Attributes *event)
{
    print_call("push", domain, event);
    return 0;
}

static int pop(const char *domain)
{
    printf("pop %s\n", domain);
    fflush(stdout);
    return 0;
}

/* The handle of a string is the string itself. */
static char *register_string(void *domain, const char *text)
{
    (void)domain;
    return strdup(text);
}

static char *create_domain(const char *name)
{
    return strdup(name);
}

int InitializeInjectionNvtx2(const void *(*table)(uint32_t))
{
    const Callbacks *callbacks = table(CALLBACKS);
    Function **functions;
    unsigned count;
    if (!callbacks || !callbacks->functions(CORE2, &functions, &count) || count <= CREATE_DOMAIN)
        return 0;
    *functions[MARK] = (Function)mark;
    *functions[PUSH] = (Function)push;
    *functions[POP] = (Function)pop;
    *functions[REGISTER_STRING] = (Function)register_string;
    *functions[CREATE_DOMAIN] = (Function)create_domain;
    return 1;
}

/* Without this function the program treats its domains as disabled. */
int InitializeInjectionNvtxExtension(void *module)
{
    (void)module;
    return 1;
}
