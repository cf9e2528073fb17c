#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ptx.py OUT.cpp IN.ptx...: nvcc's PTX as C++ for the emulation, so that what nvcc made of a kernel (its order of
operations, its widths, its barriers) is what runs. Each entry becomes a function of its parameters' addresses; a
table leads from the kernel that g++ compiled, which has the same mangled name. An instruction that is not known
here stops the translation."""
import re
import sys

CPP = {"u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t",
       "s8": "int8_t", "s16": "int16_t", "s32": "int32_t", "s64": "int64_t",
       "b8": "uint8_t", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t",
       "f32": "float", "f64": "double", "pred": "bool"}
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
SPECIAL = {"%tid": "emu_here.thread", "%ntid": "emu_here.block_dim",
           "%ctaid": "emu_here.block", "%nctaid": "emu_here.grid_dim"}
ARITHMETIC = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
# Ordered comparisons are false with a NaN; the u ones are true: the opposite one, negated.
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNORDERED = {"neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}

PREAMBLE = r"""/* Made by tests/emu/ptx.py. */
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/emu/kernel.h"

#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"

namespace
{
/* A register read as another type of at most its size. */
template <class T, class S> inline T as(S from)
{
    static_assert(sizeof(T) <= sizeof(S), "a register is read wider than it is");
    T out;
    std::memcpy(&out, &from, sizeof out);
    return out;
}

/* Wider registers are filled as the type's sign says. */
template <class D, class T> inline void put(D &to, T value)
{
    if constexpr (sizeof(D) == sizeof(T))
        std::memcpy(&to, &value, sizeof to);
    else
        to = (D)value;
}

template <class T> inline T load(uint64_t address)
{
    T out;
    std::memcpy(&out, (const void *)address, sizeof out);
    return out;
}

template <class T> inline void store(uint64_t address, T value)
{
    std::memcpy((void *)address, &value, sizeof value);
}

inline uint64_t aligned(uint64_t address, unsigned bytes)
{
    if (address % bytes)
        emu_kernel_die("a misaligned access, which a GPU refuses", 0, 0);
    return address;
}

inline uint32_t shuffled(emu_shuffle how, uint32_t mask, uint32_t value, uint32_t by, uint32_t c,
                         int line)
{
    if ((c & 31) != (how == EMU_UP ? 0 : 31))
        emu_kernel_die("a shuffle with a clamp that CUDA C++ cannot express", line, 0);
    return emu_shuffled(how, mask, value, (int)by, 32 - (int)(c >> 8 & 31), line);
}
} // namespace
"""


def stop(message):
    sys.exit(f"ptx.py: {message}")


def bits(kind):
    return 8 if kind == "pred" else int(kind[1:])


class Entry:
    """One kernel."""

    def __init__(self, name, params, body, module_shared):
        self.name = name
        self.params = {p: i for i, p in enumerate(re.findall(r"(\w+_param_\d+)", params))}
        self.shared, self.shared_bytes = {}, 0
        for align, var, size in module_shared + re.findall(
                r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\];", body):
            self.shared_bytes = -(-self.shared_bytes // int(align)) * int(align)
            self.shared[var] = self.shared_bytes
            self.shared_bytes += int(size)
        self.kinds, self.registers = {}, []
        for kind, prefix, count in re.findall(r"\.reg\s+\.(\w+)\s+%([a-z]+)<(\d+)>;", body):
            self.kinds[prefix] = kind
            self.registers += [f"    {CPP[kind]} {prefix}{i} = 0;" for i in range(int(count))]
        self.lines = []
        body = re.sub(r"\.(reg|shared)\s[^;]*;", "", body)
        for number, text in enumerate(re.findall(r"\s*(\$\w+:|[^;]+;)", body), 1):
            self.statement(text.strip().rstrip(";").strip(), number)

    def statement(self, text, number):
        if text.startswith("$"):
            self.lines.append(f"{text[1:-1]}:;")
            return
        if text.startswith(".pragma") or not text:
            return
        guard = re.match(r"@(!?)%(p\d+)\s+(.*)", text, re.S)
        code = self.instruction(guard[3] if guard else text, number)
        self.lines.append(f"    if ({guard[1]}{guard[2]}) {{ {code} }}" if guard else f"    {code}")

    def kind_of(self, operand):
        """The kind of a register, or None."""
        found = re.fullmatch(r"%([a-z]+)\d+", operand)
        return self.kinds.get(found[1]) if found else None

    def read(self, kind, operand):
        if operand.startswith("-") and self.kind_of(operand[1:]):
            return f"(-{self.read(kind, operand[1:])})"
        if self.kind_of(operand) == "pred":
            return operand[1:]
        if self.kind_of(operand):
            return f"as<{CPP[kind]}>({operand[1:]})"
        if found := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", operand):
            return f"as<{CPP[kind]}>((uint32_t)0x{found[1]})"
        if found := re.fullmatch(r"0[dD]([0-9A-Fa-f]{16})", operand):
            return f"as<{CPP[kind]}>((uint64_t)0x{found[1]}ull)"
        if found := re.fullmatch(r"(%\w+)\.([xyz])", operand):
            return f"({CPP[kind]}){SPECIAL[found[1]]}.{found[2]}"
        if operand in self.params:
            return f"(uint64_t)args[{self.params[operand]}]"
        if operand in self.shared:
            return f"({CPP[kind]}){self.shared[operand]}"
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", operand):
            if kind == "pred":
                return "true" if int(operand, 0) else "false"
            return f"(({CPP[kind]}){operand.rstrip('U')}ll)"
        return stop(f"{self.name}: operand {operand}")

    def write(self, kind, register, value):
        if register == "_":
            return f"(void)({value});"
        if self.kind_of(register) is None:
            stop(f"{self.name}: destination {register}")
        return f"put({register[1:]}, ({CPP[kind]})({value}));"

    def address(self, space, operand):
        base, offset = re.fullmatch(r"\[([^+\]]+)(?:\+(-?\d+))?\]", operand).groups()
        base, offset = base.strip(), int(offset or 0)
        if space == "shared":
            return f"(uint64_t)(shared + (uint32_t)({self.read('u32', base)} + ({offset})))"
        return f"({self.read('u64', base)} + (int64_t)({offset}))"

    def memory(self, parts, kind, operands):
        space = next((s for s in ("param", "global", "shared") if s in parts), None)
        if not space:
            stop(f"{self.name}: an access to memory of unknown kind")
        loads = parts[0] == "ld"
        where, what = (operands[1], operands[0]) if loads else operands
        width = bits(kind) // 8
        values = [v.strip() for v in what.strip("{}").split(",")]
        code = f"{{ const uint64_t at = aligned({self.address(space, where)}, {width * len(values)}); "
        for i, value in enumerate(values):
            if loads:
                code += self.write(kind, value, f"load<{CPP[kind]}>(at + {i * width})") + " "
            else:
                code += f"store<{CPP[kind]}>(at + {i * width}, {self.read(kind, value)}); "
        return code + "}"

    def move(self, kind, operands):
        to, source = operands
        for packed, other in ((to, source), (source, to)):
            if not packed.startswith("{"):
                continue
            parts = [p.strip() for p in packed.strip("{}").split(",")]
            part = f"b{bits(kind) // len(parts)}"
            whole = f"b{bits(kind)}"
            if packed is to:
                return " ".join(
                    self.write(part, p, f"{self.read(whole, other)} >> {i * bits(part)}")
                    for i, p in enumerate(parts))
            return self.write(whole, other, " | ".join(
                f"({CPP[whole]}){self.read(part, p)} << {i * bits(part)}"
                for i, p in enumerate(parts)))
        return self.write(kind, to, self.read(kind, source))

    def convert(self, parts, operands):
        """cvt[.rounding].TO.FROM"""
        to, source = parts[-2:]
        rounding = parts[1:-2]
        value = self.read(source, operands[1])
        exact = to[0] != "f" and source[0] != "f" or to == "f64"
        if not exact and (rounding != ["rn"] or to[0] != "f"):
            stop(f"{self.name}: a conversion that is not known here: {'.'.join(parts)}")
        return self.write(to, operands[0], value)

    def instruction(self, text, number):
        head = re.match(r"([\w.:]+)\s*(.*)", text, re.S)
        parts = head[1].split(".")
        operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", head[2])]
        name, kind = parts[0], parts[-1]

        def read(i, of=kind):
            return self.read(of, operands[i])

        if name in ("ld", "st"):
            return self.memory(parts, kind, operands)
        if name == "mov":
            return self.move(kind, operands)
        if name == "cvta" and parts[1:3] == ["to", "global"]:
            return self.write(kind, operands[0], read(1))
        if name == "cvt":
            return self.convert(parts, operands)
        if name in ARITHMETIC and parts[1:-1] in ([], ["rn"]):
            return self.write(kind, operands[0], f"{read(1)} {ARITHMETIC[name]} {read(2)}")
        if name == "mul" and parts[1] == "wide":
            wide = WIDER[kind]
            return self.write(wide, operands[0],
                              f"({CPP[wide]}){read(1)} * ({CPP[wide]}){read(2)}")
        if name in ("mul", "div") and parts[1:-1] == ["rn"]:
            return self.write(kind, operands[0], f"{read(1)} {'*' if name == 'mul' else '/'} {read(2)}")
        if name == "mul" and parts[1] == "lo":
            return self.write(f"u{bits(kind)}", operands[0],
                              f"{read(1, f'u{bits(kind)}')} * {read(2, f'u{bits(kind)}')}")
        if name == "fma" and parts[1:-1] == ["rn"]:
            return self.write(kind, operands[0], f"std::fma({read(1)}, {read(2)}, {read(3)})")
        if name == "sqrt" and parts[1:-1] == ["rn"]:
            return self.write(kind, operands[0], f"std::sqrt({read(1)})")
        if name == "abs" and kind[0] == "f":
            return self.write(kind, operands[0], f"std::fabs({read(1)})")
        if name == "neg":
            return self.write(kind, operands[0], f"-{read(1)}")
        if name == "not":
            return self.write(kind, operands[0], f"{'!' if kind == 'pred' else '~'}{read(1)}")
        if name in ("min", "max") and kind[0] != "f":
            return self.write(kind, operands[0], f"{name}({read(1)}, {read(2)})")
        if name in ("shl", "shr"):
            # A count beyond the width gives what shifting one by one does.
            beyond = f"{read(1)} < 0 ? -1 : 0" if name == "shr" and kind[0] == "s" else "0"
            return self.write(kind, operands[0],
                              f"{read(2, 'u32')} >= {bits(kind)} ? ({CPP[kind]})({beyond}) : "
                              f"({CPP[kind]})({read(1)} {'<<' if name == 'shl' else '>>'} {read(2, 'u32')})")
        if name == "setp" and len(parts) == 3:
            compare = parts[1]
            if compare == "equ":
                return self.write("pred", operands[0],
                                  f"!({read(1)} < {read(2)} || {read(1)} > {read(2)})")
            if compare in UNORDERED:
                return self.write("pred", operands[0], f"!({read(1)} {UNORDERED[compare]} {read(2)})")
            if compare in COMPARE and not (compare == "ne" and kind[0] == "f"):
                return self.write("pred", operands[0], f"{read(1)} {COMPARE[compare]} {read(2)}")
        if name == "selp":
            return self.write(kind, operands[0], f"{operands[3][1:]} ? {read(1)} : {read(2)}")
        if name in ("bar", "barrier") and "sync" in parts and operands == ["0"]:
            return f"emu_sync_block({number});"
        if name == "shfl" and parts[1] == "sync":
            how = {"bfly": "EMU_XOR", "down": "EMU_DOWN", "up": "EMU_UP", "idx": "EMU_INDEX"}[parts[2]]
            return self.write("b32", operands[0].split("|")[0],
                              f"shuffled({how}, {read(4, 'u32')}, {read(1, 'b32')}, {read(2, 'u32')}, "
                              f"{read(3, 'u32')}, {number})")
        if name == "bra":
            return f"goto {operands[0][1:]};"
        if name in ("ret", "exit"):
            return "return;"
        return stop(f"{self.name}: an instruction that is not known here: {text}")

    def code(self, number):
        out = [f"static void ptx_{number}([[maybe_unused]] void **args) /* {self.name} */", "{"]
        if self.shared_bytes:
            out += ["    static const char site = 0;",
                    f"    char *shared = (char *)emu_shared(&site, {self.shared_bytes}, 16);"]
        return out + self.registers + self.lines + ["}", ""]


def main():
    entries = []
    for path in sys.argv[2:]:
        with open(path, encoding="utf-8") as file:
            source = re.sub(r"//.*", "", file.read())
        found = re.findall(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\n\{(.*?)\n\}", source, re.S)
        if not found:
            stop(f"{path}: no kernel in it")
        outside = re.sub(r"\n\{.*?\n\}", "", source, flags=re.S)
        shared = re.findall(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\];", outside)
        entries += [Entry(name, params, body, [s for s in shared if s[1] in body])
                    for name, params, _, body in found]
    out = [PREAMBLE]
    for number, entry in enumerate(entries):
        out += entry.code(number)
    out += [f'extern "C" char kernel_{n}[] __asm__("{e.name}");' for n, e in enumerate(entries)]
    out += ["", "emu_translated emu_translation(const void *kernel)", "{",
            "    static const struct {", "        const void *kernel;",
            "        emu_translated run;", "    } all[] = {"]
    out += [f"        {{kernel_{n}, ptx_{n}}}," for n in range(len(entries))]
    out += ["    };", "    for (auto &each : all)", "        if (each.kernel == kernel)",
            "            return each.run;", '    emu_die("a kernel that was not translated from PTX");', "}"]
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


main()
