"""What hl-smi prints, in the layout that it has had from release 1.4 to 1.24; and a program of that name that prints it."""

from __future__ import annotations

from pathlib import Path

LINE = "+-----------------------------------------------------------------------------+\n"


def hl_smi_table(driver: str, *, tools: str | None = None, cards: int = 8, name: str = "HL-225") -> str:
    """The table of a server; later releases name the driver of the network, too."""
    network = f"| Nic Driver Version:                                 {driver}-0123abc          |\n"
    text = LINE + f"| HL-SMI Version:                              hl-{tools or driver}-fw-48.0.1.0          |\n"
    text += f"| Driver Version:                                     {driver}-9e8ecf0          |\n"
    text += network if driver >= "1.20" else ""
    text += "|-------------------------------+----------------------+----------------------+\n"
    text += "| AIP  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |\n"
    for card in range(cards):
        text += f"|   {card}  {name}              N/A  | 0000:{card}3:00.0     N/A |                   0  |\n"
        text += "| N/A   26C   N/A    87W / 600W |    768MiB / 98304MiB |     0%           N/A |\n"
    text += LINE + "| Compute Processes:                                               AIP Memory |\n"
    return text + "".join(
        f"|   {card}        N/A   N/A    N/A                                      N/A    |\n" for card in range(cards)
    )


def put_hl_smi(folder: Path, table: str, modules: str = "") -> None:
    """A program `hl-smi` in `folder`: the table, or with -Q the numbers of the modules."""
    (folder / "table").write_text(table)
    (folder / "modules").write_text(modules)
    program = folder / "hl-smi"
    program.write_text(f'#!/bin/sh\nif [ "$1" = -Q ]; then cat {folder}/modules; else cat {folder}/table; fi\n')
    program.chmod(0o755)


def put_pyhlml(folder: Path, driver: str, names: list[str]) -> None:
    """A module `pyhlml` in `folder`, with the functions that we call, which print and count as the library does."""
    (folder / "pyhlml.py").write_text(
        f"""
NAMES, opened = {names!r}, []
def hlmlInit():
    print("a library's own words")
    opened.append(True)
def hlmlShutdown():
    opened.clear()
def hlmlDeviceGetCount():
    assert opened
    return len(NAMES)
def hlmlDeviceGetHandleByIndex(index):
    assert opened
    return index
def hlmlDeviceGetName(device):
    return NAMES[device].encode() + bytes(4)
def hlmlGetDriverVersion():
    assert opened
    return {driver.encode()!r}
"""
    )
