"""pqweights inspect."""

from __future__ import annotations

import typer

from . import options, output, report


def command(folder: options.FolderArgument, json: options.JsonOption = False) -> None:
    """Show a finished folder: tensors, bits, relative errors, sizes, and totals."""
    with output.errors():
        from pqweights.inspect import inspect

        found = inspect(folder)
        if json:
            output.print_json(found.to_json())
            return
        manifest = found.manifest
        rows = [
            [
                t.name, "x".join(map(str, t.shape)), t.dtype, t.action, str(t.bits or ""), str(t.bytes),
                "" if r.relative_mse is None else f"{r.relative_mse:.6f}", r.rotation or "",
            ]
            for t, r in zip(manifest.tensors, manifest.records, strict=True)
        ]  # fmt: skip
        columns = [
            ("tensor", False), ("shape", False), ("dtype", False), ("action", False), ("bits", True), ("bytes", True),
            ("relative MSE", True), ("rotation", False),
        ]  # fmt: skip
        totals = found.totals
        bits = totals["bits_per_weight"]
        lines = [output.table(columns, rows), ""]
        lines.append(
            f"{manifest.kind}: {output.size(totals['output_bytes'])} in safetensors files, {totals['weights']} weights, "
            f"{totals['coverage']:.4%} of them quantized" + ("" if bits is None else f" at {bits:.4f} bits per weight")
        )
        if any(tensor.action == "integer" for tensor in manifest.tensors):
            lines += report.integer_lines(
                manifest.tensors, manifest.records, measured="original_fingerprint" in manifest.made_by
            )
        else:
            lines += report.quality_lines(manifest.tensors, manifest.records)
        typer.echo("\n".join(lines))
