"""The notebooks: runs each in a kernel of its own, and reads what it prints.

`python -m tests.docs.notebooks` runs all of them and writes their outputs. With `--model NAME --out FOLDER` it runs
them with another model, and writes them into that folder.
"""

import argparse
import copy
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
VARIES = "varies"  # tag of cells that print times or rounding, or what depends on them
ALONE = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}  # outputs in the repository need no network, and no GPU

_CELL_S = 600  # a cell may load a model from the hub
_OUTPUT_S = 60  # what a cell has printed may come later than its end
# With the package `ipywidgets` there is no warning that it is absent, and bars are shown, but not in files.
_QUIET = {"PYTHONWARNINGS": "ignore:IProgress not found", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def read(path: Path) -> NotebookNode:
    """A notebook from its file, checked against the schema of notebooks."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def execute(notebook: NotebookNode, folder: Path, environment: Mapping[str, str] | None = None) -> NotebookNode:
    """Run all cells in a new kernel.

    Args:
        notebook: The cells to run, which are left as they are.
        folder: In which the kernel runs.
        environment: Variables for the kernel, besides those of this process.

    Returns:
        A copy with the outputs.

    Raises:
        CellExecutionError: a cell has failed. The kernel has ended then, too.
    """
    ran = copy.deepcopy(notebook)
    with TemporaryDirectory() as runtime:  # in a short path, as the addresses of sockets have to be
        connection = {"transport": "ipc", "connection_file": f"{runtime}/kernel.json"}
        client = NotebookClient(
            ran,
            kernel_name="python3",
            timeout=_CELL_S,
            iopub_timeout=_OUTPUT_S,
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
            config=Config({"ConnectionFileMixin": connection}),
        )
        ours = {"PYTHONPATH": str(ROOT), "IPYTHONDIR": runtime, "JUPYTER_RUNTIME_DIR": runtime, **_QUIET}
        client.execute(env={**os.environ, **ours, **(environment or {})})
    ran.metadata = notebook.metadata  # the kernel has added its own version
    return ran


def printed(notebook: NotebookNode) -> list[str]:
    """The outputs of each cell of code; "" for cells whose outputs vary."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["" if VARIES in cell.metadata.get("tags", ()) else _text(cell) for cell in cells]


def warned(notebook: NotebookNode) -> str:
    """What cells have written to the standard error stream."""
    return "".join(output.text for cell in notebook.cells for output in cell.get("outputs", ()) if _is_error(output))


def with_parameters(notebook: NotebookNode, parameters: Mapping[str, str]) -> NotebookNode:
    """A copy that sets those of the parameters that its cell of parameters has."""
    changed = copy.deepcopy(notebook)
    at = next(i for i, cell in enumerate(changed.cells) if "parameters" in cell.metadata.get("tags", ()))
    known = {name: value for name, value in parameters.items() if f"{name} = " in changed.cells[at].source}
    lines = "\n".join(f"{name} = {value!r}" for name, value in known.items())
    changed.cells.insert(at + 1, nbformat.v4.new_code_cell(lines))
    return changed


def _text(cell: NotebookNode) -> str:
    texts = [output.text if "text" in output else output.data["text/plain"] for output in cell.outputs]
    return "".join(texts)


def _is_error(output: NotebookNode) -> bool:
    return output.output_type == "stream" and output.name == "stderr"


def main(arguments: list[str] | None = None) -> None:
    """Run notebooks, and write them with their outputs."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.notebooks", description=main.__doc__)
    parser.add_argument("notebooks", type=Path, nargs="*", default=NOTEBOOKS, help="default: all")
    parser.add_argument("--model", help="a hub name or a folder, in place of the embedded model")
    parser.add_argument("--draft", help="with a model, a smaller one of the same vocabulary; else the model itself")
    parser.add_argument("--out", type=Path, help="where to write; default: where they are")
    options = parser.parse_args(arguments)
    if options.model and options.out is None:
        parser.error("`--model` needs `--out`: the outputs in the repository are those of the embedded model.")
    parameters = {"MODEL": options.model, "DRAFT": options.draft or options.model} if options.model else {}
    for path in options.notebooks:
        notebook = read(path)
        with TemporaryDirectory() as folder:
            if parameters:
                ran = execute(with_parameters(notebook, parameters), Path(folder))
            else:
                ran = execute(notebook, Path(folder), ALONE)
        out = path if options.out is None else options.out / path.name
        nbformat.write(ran, out)
        sys.stderr.write(f"{out}\n{warned(ran)}")


if __name__ == "__main__":
    main()
