#include "exact/patching.h"

#include <elf.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* --- instructions --------------------------------------------------------------------------------- */

enum kind { TEXTURE, SURFACE, MULTIMEM, TENSOR_STORE, TENSOR_REDUCTION, ASYNCHRONOUS, SYSTEM, KINDS };

static const char *const KIND_NAMES[KINDS] = {
    [TEXTURE] = "reads of textures",
    [SURFACE] = "accesses to surfaces",
    [MULTIMEM] = "multimem.ld_reduce",
    [TENSOR_STORE] = MACHINE_CODE_TENSOR_STORES,
    [TENSOR_REDUCTION] = "reductions by tensor maps",
    [ASYNCHRONOUS] = "st.async or red.async to global memory",
    [SYSTEM] = "functions of the driver",
};

#define INSTRUCTION_BYTES 16
#define OPCODES 512 /* in the low 9 bits; the 3 above say where operands come from */

/* As ptxas 13.0 makes them for compute capabilities 8.0 to 12.0. Where there are two, the second is for a
 * texture or surface whose handle is in a register. */
static const unsigned char KIND_OF[OPCODES] = {
    [0x160] = 1 + TEXTURE,      [0x161] = 1 + TEXTURE,      /* TEX */
    [0x163] = 1 + TEXTURE,      [0x164] = 1 + TEXTURE,      /* TLD4 */
    [0x166] = 1 + TEXTURE,      [0x167] = 1 + TEXTURE,      /* TLD */
    [0x16C] = 1 + TEXTURE,      [0x16D] = 1 + TEXTURE,      /* TXD */
    [0x199] = 1 + SURFACE,      [0x19A] = 1 + SURFACE,      /* SULD */
    [0x19B] = 1 + SURFACE,      [0x19C] = 1 + SURFACE,      /* SUST.P */
    [0x19D] = 1 + SURFACE,      [0x19E] = 1 + SURFACE,      /* SUST.D */
    [0x19F] = 1 + SURFACE,      [0x1A0] = 1 + SURFACE,      /* SURED */
    [0x1A4] = 1 + MULTIMEM,     [0x1A5] = 1 + MULTIMEM,     /* LDGMC: integers; floats */
    [0x177] = 1 + ASYNCHRONOUS, [0x178] = 1 + ASYNCHRONOUS, /* USTGR; UREDGR */
    [0x1B5] = 1 + TENSOR_STORE,                             /* UTMASTG: 13.5 has an id, but reports nothing */
    [0x1B6] = 1 + TENSOR_REDUCTION,                         /* UTMAREDG */
};

/* A bit for each kind that is in code. */
static unsigned kinds_in(const unsigned char *code, size_t bytes)
{
    unsigned kinds = 0;
    for (size_t at = 0; at + INSTRUCTION_BYTES <= bytes; at += INSTRUCTION_BYTES)
        kinds |= 1u << KIND_OF[(code[at] | code[at + 1] << 8) & (OPCODES - 1)];
    return kinds >> 1;
}

/* --- sections --------------------------------------------------------------------------------------- */

typedef struct {
    const unsigned char *bytes;
    size_t size;
    uint64_t sections_at;
    size_t sections, names; /* how many; the one that has their names */
} image;

static bool is_inside(const image *elf, uint64_t offset, uint64_t size)
{
    return size <= elf->size && offset <= elf->size - size;
}

static Elf64_Shdr section_of(const image *elf, size_t number)
{
    Elf64_Shdr header;
    memcpy(&header, elf->bytes + elf->sections_at + number * sizeof header, sizeof header);
    return header;
}

/* The string at ``offset`` of a table, or NULL. */
static const char *string_in(const image *elf, size_t table, uint64_t offset)
{
    if (table >= elf->sections)
        return NULL;
    const Elf64_Shdr header = section_of(elf, table);
    if (header.sh_type == SHT_NOBITS || !is_inside(elf, header.sh_offset, header.sh_size) ||
        offset >= header.sh_size)
        return NULL;
    const char *begin = (const char *)elf->bytes + header.sh_offset + offset;
    return memchr(begin, 0, header.sh_size - offset) ? begin : NULL;
}

static bool open_image(image *elf)
{
    Elf64_Ehdr header;
    if (elf->size < sizeof header)
        return false;
    memcpy(&header, elf->bytes, sizeof header);
    if (memcmp(header.e_ident, ELFMAG, SELFMAG) || header.e_ident[EI_CLASS] != ELFCLASS64 ||
        header.e_ident[EI_DATA] != ELFDATA2LSB || header.e_machine != EM_CUDA ||
        header.e_shentsize != sizeof(Elf64_Shdr) ||
        !is_inside(elf, header.e_shoff, sizeof(Elf64_Shdr)))
        return false;
    elf->sections_at = header.e_shoff;
    /* Where there are too many for the header, the first section says. */
    const Elf64_Shdr first = section_of(elf, 0);
    elf->sections = header.e_shnum ? header.e_shnum : first.sh_size;
    elf->names = header.e_shstrndx == SHN_XINDEX ? first.sh_link : header.e_shstrndx;
    return elf->sections <= elf->size / sizeof(Elf64_Shdr) &&
           is_inside(elf, elf->sections_at, elf->sections * sizeof(Elf64_Shdr));
}

/* --- functions -------------------------------------------------------------------------------------- */

typedef struct {
    const char *name; /* NULL: no code */
    unsigned kinds;
    bool is_kernel;
} function;

#define TEXT ".text."
#define IS_KERNEL 0x10 /* of a symbol's st_other */
#define SYSTEM_PREFIX "__cuda_syscall_"

static bool has_prefix(const char *name, const char *prefix)
{
    return name && !strncmp(name, prefix, strlen(prefix));
}

/* False where a section of code cannot be read. */
static bool scan_code(const image *elf, function *functions)
{
    for (size_t i = 0; i < elf->sections; i++) {
        const Elf64_Shdr header = section_of(elf, i);
        if (header.sh_type != SHT_PROGBITS || !(header.sh_flags & SHF_EXECINSTR))
            continue;
        const char *name = string_in(elf, elf->names, header.sh_name);
        if (!header.sh_size)
            continue;
        if (!has_prefix(name, TEXT) || header.sh_flags & SHF_COMPRESSED ||
            !is_inside(elf, header.sh_offset, header.sh_size))
            return false;
        functions[i].name = name + strlen(TEXT);
        functions[i].kinds = kinds_in(elf->bytes + header.sh_offset, header.sh_size);
    }
    return true;
}

/* Find out which functions are kernels; the others may be called by any. What the driver brings along, such
 * as texture reads with gradients in three dimensions, is code that we do not see. */
static bool scan_symbols(const image *elf, const Elf64_Shdr *table, function *functions, unsigned *shared_kinds)
{
    if (!is_inside(elf, table->sh_offset, table->sh_size))
        return false;
    for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= table->sh_size; at += sizeof(Elf64_Sym)) {
        Elf64_Sym symbol;
        memcpy(&symbol, elf->bytes + table->sh_offset + at, sizeof symbol);
        if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC)
            continue;
        if (symbol.st_shndx == SHN_UNDEF) {
            if (has_prefix(string_in(elf, table->sh_link, symbol.st_name), SYSTEM_PREFIX))
                *shared_kinds |= 1u << SYSTEM;
        } else if (symbol.st_other & IS_KERNEL && symbol.st_shndx < elf->sections) {
            functions[symbol.st_shndx].is_kernel = true;
        }
    }
    return true;
}

static bool scan(const image *elf, function *functions, unsigned *shared_kinds)
{
    for (size_t i = 0; i < elf->sections; i++) {
        const Elf64_Shdr header = section_of(elf, i);
        if (header.sh_type == SHT_SYMTAB && !scan_symbols(elf, &header, functions, shared_kinds))
            return false;
    }
    if (!scan_code(elf, functions))
        return false;
    for (size_t i = 0; i < elf->sections; i++)
        if (!functions[i].is_kernel)
            *shared_kinds |= functions[i].kinds;
    return true;
}

int machine_code_find_unreported(const void *cubin, size_t bytes,
                        void (*found)(void *to, const char *function, const char *what), void *to)
{
    image elf = {.bytes = cubin, .size = bytes};
    if (!open_image(&elf))
        return -1;
    function *functions = calloc(elf.sections + 1, sizeof *functions);
    unsigned shared_kinds = 0;
    const bool readable = functions && scan(&elf, functions, &shared_kinds);
    int count = 0;
    for (size_t i = 0; readable && i < elf.sections; i++)
        for (unsigned kind = 0; functions[i].name && kind < KINDS; kind++)
            if ((functions[i].kinds | shared_kinds) >> kind & 1) {
                found(to, functions[i].name, KIND_NAMES[kind]);
                count++;
            }
    free(functions);
    return readable ? count : -1;
}
