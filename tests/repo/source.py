"""Reads Python sources: the modules below a folder, and what each of them imports."""

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "src"
INTEGRATIONS = sorted((ROOT / "integrations").glob("*/src"))


@dataclass(frozen=True, slots=True)
class Import:
    """One module that is imported, and the name that is taken from it ("" for `import module`)."""

    module: str
    name: str
    line: int
    in_function: bool = False
    typing_only: bool = False

    def target(self, known: Collection[str]) -> str:
        """The module that is meant: in `from package import name` the name may be a module itself."""
        inner = f"{self.module}.{self.name}"
        return inner if inner in known else self.module


@dataclass(frozen=True, slots=True)
class Module:
    """One module, by its full name, and what it imports."""

    name: str
    imports: tuple[Import, ...]


def parse(name: str, text: str, *, is_package: bool = False) -> Module:
    """Read a module from its text."""
    package = name if is_package else name.rpartition(".")[0]
    return Module(name, tuple(_imports(ast.parse(text), package, in_function=False, typing_only=False)))


def modules(folder: Path) -> dict[str, Module]:
    """Read every module below a folder of sources."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        is_package = path.name == "__init__.py"
        name = ".".join((path.parent if is_package else path.with_suffix("")).relative_to(folder).parts)
        found[name] = parse(name, path.read_text(encoding="utf-8"), is_package=is_package)
    return found


def _imports(node: ast.AST, package: str, *, in_function: bool, typing_only: bool) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield Import(alias.name, "", node.lineno, in_function, typing_only)
        case ast.ImportFrom(names=names):
            for alias in names:
                yield Import(_absolute(node, package), alias.name, node.lineno, in_function, typing_only)
        case ast.If(test=test, body=body, orelse=orelse):
            guarded = typing_only or ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
            for statement in body:
                yield from _imports(statement, package, in_function=in_function, typing_only=guarded)
            for statement in orelse:
                yield from _imports(statement, package, in_function=in_function, typing_only=typing_only)
        case _:
            inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.iter_child_nodes(node):
                yield from _imports(child, package, in_function=inside, typing_only=typing_only)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parents, node.module] if node.module else parents)
