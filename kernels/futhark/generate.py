"""Makes of ops.toml the root Futhark program and the C that binds it to the kernel table.

generate.py OUT [ONLY]: writes OUT/glm.fut and OUT/ops.c, with the variants whose names match the pattern ONLY.
"""

import itertools
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
# A choice of a type: the Futhark type in arrays, and the module that reads and writes it.
CODECS = {"f32": ("f32", "f32c"), "bf16": ("u16", "bf16c"), "f16": ("u16", "f16c"), "fp8_e4m3": ("u8", "fp8c")}
SCALARS = {"i64": "int64_t", "i32": "int32_t", "f32": "float", "bool": "bool"}
BYTES = {"u8": 1, "u16": 2, "i32": 4, "u32": 4, "f32": 4, "u64": 8}
Entry = dict[str, Any]


class Argument(NamedTuple):
    name: str
    type: str  # of the elements, as Futhark has it
    dims: list[str]
    value: str
    in_place: bool
    whole: bool
    on_host: bool

    @property
    def array(self) -> str:
        return f"{self.type}_{len(self.dims)}d"

    @property
    def declared(self) -> str:
        return f"{'*' if self.in_place else ''}{''.join(f'[{dim}]' for dim in self.dims)}{self.type}"


class Variant(NamedTuple):
    """An entry with its types chosen."""

    name: str
    codecs: list[str]
    condition: str
    arguments: list[Argument]


def argument(name: str, written: str, value: str, types: dict[str, str]) -> Argument:
    element = re.sub(r"\[\w+\]|[*=&]", "", written)
    dims = re.findall(r"\[(\w+)\]", written)
    mark = written[0]
    return Argument(name, types.get(element, element), dims, value, mark in "*=", mark == "=", mark == "&")


def variants(entry: Entry, only: str) -> list[Variant]:
    made = []
    choices = [[(name, where, choice) for choice in every.split()] for name, where, every in entry.get("types", [])]
    for chosen in itertools.product(*choices):
        kinds = [choice.removeprefix("w_") for _, _, choice in chosen]
        types = {name: CODECS[kind][0] for (name, _, _), kind in zip(chosen, kinds, strict=True)}
        condition = " && ".join(
            ([f"({entry['when']})"] if "when" in entry else [])
            + [f"{where} == GLM_{c.upper()}" for _, where, c in chosen]
        )
        arguments = [argument(*row, types) for row in entry["arguments"]]
        name = "_".join([entry["name"], *kinds])
        if re.fullmatch(only, name):
            made.append(Variant(name, [CODECS[kind][1] for kind in kinds], condition or "true", arguments))
    return made


def program(entries: list[Entry], out: Path, only: str) -> str:
    """glm.fut."""
    path = os.path.relpath(HERE, out)
    files = sorted({entry.get("file", entry["name"]) for entry in entries})
    lines = [f'import "{path}/codec"', *(f'module file_{file} = import "{path}/{file}"' for file in files)]
    for entry in entries:
        file = f"file_{entry.get('file', entry['name'])}"
        for variant in variants(entry, only):
            where = file
            if variant.codecs:
                where = f"module_{variant.name}"
                lines.append(f"module {where} = {file}.mk_{entry['name']} {' '.join(variant.codecs)}")
            sizes = list(dict.fromkeys(dim for a in variant.arguments for dim in a.dims if not dim.isdigit()))
            named = " ".join(f"({a.name}: {a.declared})" for a in variant.arguments)
            results = ", ".join(a.declared for a in variant.arguments if a.in_place)
            call = " ".join(a.name for a in variant.arguments)
            lines.append(
                f"entry {variant.name} {' '.join(f'[{size}]' for size in sizes)} {named} : ({results}) =\n"
                f"  {where}.{entry['name']} {call}"
            )
    return "\n".join(lines) + "\n"


def kept(variant: Variant, a: Argument) -> list[str]:
    """What the entry returns for an array is the caller's, or, where it is whole, a new one that is copied there."""
    raw = f"futhark_values_raw_{a.array}(context, {a.name}_after)"
    if a.whole:
        action = f"glm_keep(device, {a.name}_span.memory, {raw}, {a.name}_bytes)"
    else:
        action = f'glm_not_in_place(device, "{variant.name}", "{a.name}")'
    return [
        f"  if (status == GLM_OK && {a.name}_bytes > 0 && {raw} != {a.name}_span.memory)",
        f"    status = {action};",
    ]


def made_array(variant: Variant, a: Argument, sizes: dict[str, str]) -> list[str]:
    """The caller's memory as a Futhark array; NULL if it cannot be had."""
    dims = [f"(int64_t)({sizes.get(dim, dim)})" for dim in a.dims]
    declared = f"  struct futhark_{a.array}* {a.name} = status != GLM_OK ? NULL :"
    if a.on_host:
        return [f"{declared} futhark_new_{a.array}(context, {a.value}, {', '.join(dims)});"]
    where = f"{a.value}, {a.name}_bytes, {str(a.in_place).lower()}"
    opened = f'glm_span_open(device, "{variant.name}", "{a.name}", {where}, &{a.name}_span)'
    made = f"futhark_new_raw_{a.array}(context, {a.name}_span.memory, {', '.join(dims)})"
    return [
        f"  const int64_t {a.name}_bytes = {' * '.join(dims)} * {BYTES[a.type]};",
        f"  glm_span {a.name}_span = {{0}};",
        f"  if (status == GLM_OK) status = {opened};",
        f"{declared} {made};",
    ]


def call(entry: Entry, variant: Variant, op: str) -> str:
    """The C function that makes one call of an entry."""
    sizes = entry["sizes"]
    arrays = [a for a in variant.arguments if a.dims]
    part = ", int32_t p" if entry.get("parts") else ""
    lines = [
        f"static glm_status call_{variant.name}(glm_device* device, const glm_{op}_args* a{part}) {{",
        "  struct futhark_context* context = glm_context(device);",
        "  glm_status status = GLM_OK;",
    ]
    for experts in entry.get("experts", []):
        lines += [
            f"  glm_experts {experts}_weights = {{0}};",
            f"  if (status == GLM_OK) status = glm_experts_open(device, &a->{experts}, &{experts}_weights);",
        ]
    for a in arrays:
        lines += made_array(variant, a, sizes)
    results = [a for a in arrays if a.in_place]
    lines += [f"  struct futhark_{a.array}* {a.name}_after = NULL;" for a in results]
    outputs = "".join(f"&{a.name}_after, " for a in results)
    values = ", ".join(a.name if a.dims else f"({SCALARS[a.type]})({a.value})" for a in variant.arguments)
    made = " && ".join(f"{a.name} != NULL" for a in arrays)
    lines += [
        "  if (status == GLM_OK) {",
        f"    int failed = !({made});",
        f"    if (!failed) failed = futhark_entry_{variant.name}(context, {outputs}{values});",
        f'    status = glm_entry_status(device, failed, "{variant.name}");',
        "  }",
    ]
    for a in results:
        lines += [
            *kept(variant, a),
            f"  if ({a.name}_after != NULL) futhark_free_{a.array}(context, {a.name}_after);",
        ]
    for a in arrays:
        lines.append(f"  if ({a.name} != NULL) futhark_free_{a.array}(context, {a.name});")
        if not a.on_host:
            lines.append(f"  status = glm_span_close(device, &{a.name}_span, status);")
    lines += [f"  glm_experts_close(&{experts}_weights);" for experts in entry.get("experts", [])]
    return "\n".join([*lines, "  return status;", "}"])


def chosen(entry: Entry, variant: Variant) -> str:
    if not entry.get("parts"):
        return f"  if ({variant.condition}) return call_{variant.name}(device, a);"
    return (
        f"  if ({variant.condition}) {{\n"
        "    glm_status status = GLM_OK;\n"
        "    for (int32_t p = 0; p < a->num_parts && status == GLM_OK; ++p)\n"
        f"      if (a->parts[p].rows > 0) status = call_{variant.name}(device, a, p);\n"
        "    return status;\n"
        "  }"
    )


def operation(op: str, entries: list[Entry], only: str) -> str:
    """The calls of an operation's entries, and the function that chooses."""
    calls = [call(entry, variant, op) for entry in entries for variant in variants(entry, only)]
    lines = [
        f"glm_status glm_futhark_{op}(glm_device* device, const glm_{op}_args* a) {{",
        "  if (a->rows == 0) return GLM_OK;",
    ]
    for entry in entries:
        if "unsupported" in entry:
            condition, what = entry["unsupported"]
            lines.append(f'  if ({condition}) return glm_unsupported(device, "{op}", "{what}");')
    lines += [chosen(entry, variant) for entry in entries for variant in variants(entry, only)]
    if not lines[-1].startswith("  if (true)"):
        lines.append(f'  return glm_unsupported(device, "{op}", "these dtypes, or was built without them");')
    else:
        lines[-1] = lines[-1].replace("if (true) ", "")
    return "\n\n".join([*calls, "\n".join([*lines, "}"])])


def binding(entries: list[Entry], only: str) -> str:
    """ops.c."""
    by_op: dict[str, list[Entry]] = {}
    for entry in entries:
        by_op.setdefault(entry.get("op", entry["name"]), []).append(entry)
    parts = [
        '#include "binding.h"',
        '#include "glm_program.h"',
        *(operation(op, found, only) for op, found in by_op.items()),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    only = sys.argv[2] if len(sys.argv) > 2 else ".*"
    with (HERE / "ops.toml").open("rb") as file:
        entries: list[Entry] = tomllib.load(file)["entry"]
    (out / "glm.fut").write_text(program(entries, out, only))
    (out / "ops.c").write_text(binding(entries, only))


if __name__ == "__main__":
    main()
