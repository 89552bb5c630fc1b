"""A kind of import contract that import-linter does not bring: a list of what may be imported.

A package that is added tomorrow is thereby forbidden until someone decides otherwise.
"""

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class OnlyContract(Contract):
    """The importers, and all inside them, import directly only themselves and what is allowed.

    With `among`, only imports of these packages are looked at; without, all imports of the root package.
    """

    type_name = "only"

    importers = fields.ListField(subfield=fields.StringField())
    allowed = fields.ListField(subfield=fields.StringField())
    among = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Collect every import that is not allowed."""
        allowed: list[str] = self.allowed  # type: ignore[assignment]
        among: list[str] = self.among or [self.session_options["root_packages"][0]]  # type: ignore[assignment]
        broken = []
        for expression in self.importers:  # type: ignore[attr-defined]
            for top in sorted(graph.find_matching_modules(expression)):
                for importer in sorted({top} | graph.find_descendants(top)):
                    broken += [
                        (importer, imported, graph.get_import_details(importer=importer, imported=imported))
                        for imported in sorted(graph.find_modules_directly_imported_by(importer))
                        if _inside(imported, among) and not _inside(imported, [top, *allowed])
                    ]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Show importer, imported and line."""
        details: Any
        for importer, imported, details in check.metadata["broken"]:
            lines = ", ".join(str(detail["line_number"]) for detail in details)
            output.print_error(f"- {importer} -> {imported} (l.{lines})")


def _inside(module: str, packages: list[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
