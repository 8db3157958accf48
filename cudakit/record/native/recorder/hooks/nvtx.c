/* The injection library of NVTX. At its first NVTX call, a library or program loads the injection library from the
 * path in NVTX_INJECTION64_PATH, and the injection library replaces the NVTX functions of its caller.
 *
 * The recorder is its own injection library, so that ranges and GPU work are in one trace. Each library that uses
 * NVTX has its own table of functions, so the replacement is repeated for each library. Source of the interface:
 * nvtxTypes.h and nvToolsExt.h of NVTX 3, https://github.com/NVIDIA/NVTX.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

#include "hooks/hooks.h"
#include "model/ranges.h"
#include "recorder.h"

#define EXPORTED __attribute__((visibility("default")))
#define MAX_UTF8_BYTES 4096

/* NvtxExportTableID, NvtxCallbackModule */
enum { TABLE_CALLBACKS = 1, MODULE_CORE = 1, MODULE_CORE2 = 5 };

/* NvtxCallbackIdCore */
enum {
    CORE_MARK_EX = 1,
    CORE_MARK_A,
    CORE_MARK_W,
    CORE_RANGE_START_EX,
    CORE_RANGE_START_A,
    CORE_RANGE_START_W,
    CORE_RANGE_END,
    CORE_RANGE_PUSH_EX,
    CORE_RANGE_PUSH_A,
    CORE_RANGE_PUSH_W,
    CORE_RANGE_POP,
};

/* NvtxCallbackIdCore2 */
enum {
    CORE2_DOMAIN_MARK_EX = 1,
    CORE2_DOMAIN_RANGE_START_EX = 2,
    CORE2_DOMAIN_RANGE_END = 3,
    CORE2_DOMAIN_RANGE_PUSH_EX = 4,
    CORE2_DOMAIN_RANGE_POP = 5,
    CORE2_DOMAIN_REGISTER_STRING_A = 10,
    CORE2_DOMAIN_REGISTER_STRING_W = 11,
    CORE2_DOMAIN_CREATE_A = 12,
    CORE2_DOMAIN_CREATE_W = 13,
};

typedef void (*nvtx_function)(void);

typedef struct { /* NvtxExportTableCallbacks */
    size_t struct_size;
    int (*get_functions)(int module, nvtx_function ***table, unsigned *count);
} nvtx_callbacks;

enum { MESSAGE_ASCII = 1, MESSAGE_UNICODE = 2, MESSAGE_REGISTERED = 3 }; /* nvtxMessageType_t */

typedef struct { /* nvtxEventAttributes_t, the same in versions 1 to 3 */
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    union {
        const char *ascii;
        const wchar_t *unicode;
        const struct interned_text *registered;
    } message;
} nvtx_attributes;

#define DEFAULT_DOMAIN ""
#define INJECTION_VARIABLE "NVTX_INJECTION64_PATH"

static bool records_nvtx; /* whether the calls of NVTX are recorded; read without the recorder lock */

void nvtx_enable(bool enable)
{
    __atomic_store_n(&records_nvtx, enable, __ATOMIC_RELEASE);
}

/* Return whether NVTX calls are recorded now. NVTX calls inside CUDA calls of the recorder are not recorded. */
static bool is_recording(void)
{
    return __atomic_load_n(&records_nvtx, __ATOMIC_ACQUIRE) && !this_thread.in_recorder_call;
}

/* --- texts -------------------------------------------------------------------------------------- */

/* Write a character in UTF-8 and return its length, which is at most 4 bytes. */
static size_t put_character(char *out, uint32_t character)
{
    if (character < 0x80) {
        out[0] = (char)character;
        return 1;
    }
    const size_t continuation_bytes = character < 0x800 ? 1 : character < 0x10000 ? 2 : 3;
    static const uint8_t LEAD_BYTE[] = {0, 0xC0, 0xE0, 0xF0};
    out[0] = (char)(LEAD_BYTE[continuation_bytes] | character >> 6 * continuation_bytes);
    for (size_t i = 1; i <= continuation_bytes; i++)
        out[i] = (char)(0x80 | (character >> 6 * (continuation_bytes - i) & 0x3F));
    return continuation_bytes + 1;
}

/* Convert a wide string to UTF-8, and truncate it to the size of ``out``. On Linux a wchar_t is one character. */
static const char *convert_to_utf8(const wchar_t *wide, char out[MAX_UTF8_BYTES])
{
    size_t length = 0;
    for (; wide && *wide && length + 5 <= MAX_UTF8_BYTES; wide++) {
        const uint32_t character = (uint32_t)*wide;
        const bool is_valid = character <= 0x10FFFF && (character < 0xD800 || character > 0xDFFF);
        length += put_character(out + length, is_valid ? character : 0xFFFD);
    }
    out[length] = 0;
    return out;
}

/* A registered string or the name of a domain; its address is the handle that NVTX's callers hold. Equal texts share
 * one handle, so that registering a string repeatedly uses no more memory. */
typedef struct interned_text {
    struct interned_text *next_text;
    char text[];
} interned_text;

#define INTERNED_TEXT_LISTS 1024
static interned_text
    *interned_texts[INTERNED_TEXT_LISTS]; /* lists of texts by their hash; protected by the recorder lock */

/* Return the handle of a text; NULL if no memory is left. Takes the recorder lock. */
static interned_text *intern_text(const char *text)
{
    uint32_t hash = 0;
    for (const char *letter = text; *letter; letter++)
        hash = hash * 31 + (uint8_t)*letter;
    interned_text **list = interned_texts + hash % INTERNED_TEXT_LISTS;
    pthread_mutex_lock(&recorder_lock);
    interned_text *match = *list;
    while (match && strcmp(match->text, text) != 0)
        match = match->next_text;
    if (!match && (match = malloc(sizeof *match + strlen(text) + 1))) {
        memcpy(match->text, text, strlen(text) + 1);
        match->next_text = *list;
        *list = match;
    }
    pthread_mutex_unlock(&recorder_lock);
    return match;
}

/* Return a text, or an empty text for NULL. */
static const char *text_or_empty(const char *text)
{
    return text ? text : "";
}

/* Return the name of a domain from its handle; the handle of the default domain is NULL. */
static const char *domain_name(const interned_text *domain)
{
    return domain ? domain->text : DEFAULT_DOMAIN;
}

/* Return the message of an event. A wide string is converted into ``out``. */
static const char *event_message(const nvtx_attributes *event, char out[MAX_UTF8_BYTES])
{
    if (!event || event->size < offsetof(nvtx_attributes, message) + sizeof event->message)
        return "";
    switch (event->message_type) {
    case MESSAGE_ASCII: return text_or_empty(event->message.ascii);
    case MESSAGE_UNICODE: return convert_to_utf8(event->message.unicode, out);
    case MESSAGE_REGISTERED: return event->message.registered ? event->message.registered->text : "";
    }
    return "";
}

/* --- functions of NVTX for named domains ----------------------------------------------------------- */

/* The functions below have the names and parameters of the functions in nvToolsExt.h that they replace. They take the
 * recorder lock. */

static void domain_mark_ex(const interned_text *domain, const nvtx_attributes *event)
{
    char utf8_text[MAX_UTF8_BYTES];
    if (is_recording())
        range_mark(event_message(event, utf8_text), domain_name(domain));
}

static int domain_range_push_ex(const interned_text *domain, const nvtx_attributes *event)
{
    char utf8_text[MAX_UTF8_BYTES];
    return is_recording() ? range_push(event_message(event, utf8_text), domain_name(domain)) : -1;
}

static int domain_range_pop(const interned_text *domain)
{
    return is_recording() ? range_pop(domain_name(domain)) : -1;
}

static uint64_t domain_range_start_ex(const interned_text *domain, const nvtx_attributes *event)
{
    char utf8_text[MAX_UTF8_BYTES];
    return is_recording() ? range_start(event_message(event, utf8_text), domain_name(domain)) : 0;
}

static void domain_range_end(const interned_text *domain, uint64_t number)
{
    (void)domain;
    if (is_recording())
        range_end(number);
}

static const interned_text *domain_register_string_a(const interned_text *domain, const char *text)
{
    (void)domain;
    return intern_text(text_or_empty(text));
}

static const interned_text *domain_register_string_w(const interned_text *domain, const wchar_t *text)
{
    char utf8_text[MAX_UTF8_BYTES];
    (void)domain;
    return intern_text(convert_to_utf8(text, utf8_text));
}

static const interned_text *domain_create_a(const char *name)
{
    return intern_text(text_or_empty(name));
}

static const interned_text *domain_create_w(const wchar_t *name)
{
    char utf8_text[MAX_UTF8_BYTES];
    return intern_text(convert_to_utf8(name, utf8_text));
}

/* --- functions of NVTX for the default domain ------------------------------------------------------ */

/* The functions below have the names and parameters of the NVTX functions that they replace. They take the recorder
 * lock. */

static void mark_ex(const nvtx_attributes *event)
{
    domain_mark_ex(NULL, event);
}

static void mark_a(const char *name)
{
    if (is_recording())
        range_mark(text_or_empty(name), DEFAULT_DOMAIN);
}

static void mark_w(const wchar_t *name)
{
    char utf8_text[MAX_UTF8_BYTES];
    mark_a(convert_to_utf8(name, utf8_text));
}

static uint64_t range_start_ex(const nvtx_attributes *event)
{
    return domain_range_start_ex(NULL, event);
}

static uint64_t range_start_a(const char *name)
{
    return is_recording() ? range_start(text_or_empty(name), DEFAULT_DOMAIN) : 0;
}

static uint64_t range_start_w(const wchar_t *name)
{
    char utf8_text[MAX_UTF8_BYTES];
    return range_start_a(convert_to_utf8(name, utf8_text));
}

static void end_range(uint64_t number)
{
    domain_range_end(NULL, number);
}

static int range_push_ex(const nvtx_attributes *event)
{
    return domain_range_push_ex(NULL, event);
}

static int range_push_a(const char *name)
{
    return is_recording() ? range_push(text_or_empty(name), DEFAULT_DOMAIN) : -1;
}

static int range_push_w(const wchar_t *name)
{
    char utf8_text[MAX_UTF8_BYTES];
    return range_push_a(convert_to_utf8(name, utf8_text));
}

static int pop_range(void)
{
    return domain_range_pop(NULL);
}

/* --- initialization ------------------------------------------------------------------------------- */

typedef struct {
    unsigned number;
    nvtx_function function;
} replacement;

#define REPLACE(number, function) {number, (nvtx_function)(function)}

static const replacement CORE[] = {
    REPLACE(CORE_MARK_EX, mark_ex),
    REPLACE(CORE_MARK_A, mark_a),
    REPLACE(CORE_MARK_W, mark_w),
    REPLACE(CORE_RANGE_START_EX, range_start_ex),
    REPLACE(CORE_RANGE_START_A, range_start_a),
    REPLACE(CORE_RANGE_START_W, range_start_w),
    REPLACE(CORE_RANGE_END, end_range),
    REPLACE(CORE_RANGE_PUSH_EX, range_push_ex),
    REPLACE(CORE_RANGE_PUSH_A, range_push_a),
    REPLACE(CORE_RANGE_PUSH_W, range_push_w),
    REPLACE(CORE_RANGE_POP, pop_range),
};

static const replacement CORE2[] = {
    REPLACE(CORE2_DOMAIN_MARK_EX, domain_mark_ex),
    REPLACE(CORE2_DOMAIN_RANGE_START_EX, domain_range_start_ex),
    REPLACE(CORE2_DOMAIN_RANGE_END, domain_range_end),
    REPLACE(CORE2_DOMAIN_RANGE_PUSH_EX, domain_range_push_ex),
    REPLACE(CORE2_DOMAIN_RANGE_POP, domain_range_pop),
    REPLACE(CORE2_DOMAIN_REGISTER_STRING_A, domain_register_string_a),
    REPLACE(CORE2_DOMAIN_REGISTER_STRING_W, domain_register_string_w),
    REPLACE(CORE2_DOMAIN_CREATE_A, domain_create_a),
    REPLACE(CORE2_DOMAIN_CREATE_W, domain_create_w),
};

/* Replace functions of an NVTX module; return whether the module exists. Functions that the caller's older version of
 * NVTX lacks are skipped. */
static bool replace_functions(const nvtx_callbacks *callbacks, int module, const replacement *functions,
                              size_t count)
{
    nvtx_function **table = NULL;
    unsigned table_size = 0;
    if (!callbacks->get_functions(module, &table, &table_size) || !table)
        return false;
    for (size_t i = 0; i < count; i++)
        if (functions[i].number < table_size && table[functions[i].number])
            *table[functions[i].number] = functions[i].function;
    return true;
}

const char *nvtx_inject(void)
{
    char path[PATH_MAX];
    Dl_info this_library;
    if (!dladdr((const void *)nvtx_inject, &this_library) || !realpath(this_library.dli_fname, path))
        return NULL;
    const char *other_tool = getenv(INJECTION_VARIABLE);
    if (other_tool && *other_tool && strcmp(other_tool, path) != 0)
        return other_tool;
    setenv(INJECTION_VARIABLE, path, 1);
    return NULL;
}

/* Replace the NVTX functions of the caller. NVTX calls this function; after a result of 0, NVTX disables its
 * functions. */
EXPORTED int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t table))
{
    const nvtx_callbacks *callbacks = get_export_table ? get_export_table(TABLE_CALLBACKS) : NULL;
    if (!is_recording() || !callbacks || callbacks->struct_size < sizeof *callbacks)
        return 0;
    return replace_functions(callbacks, MODULE_CORE, CORE, sizeof CORE / sizeof *CORE) &&
           replace_functions(callbacks, MODULE_CORE2, CORE2, sizeof CORE2 / sizeof *CORE2);
}

/* Newer versions of NVTX call this function for payloads and counters, which are not recorded. Without this
 * function, the Python package nvtx uses no domains. */
EXPORTED int InitializeInjectionNvtxExtension(const void *module)
{
    (void)module;
    return is_recording();
}
