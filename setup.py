"""What an index page shows of the project, made when the wheel is built; all else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

# Where the repository is served, such as https://HOST/OWNER/gaudi-bert; empty until it is.
REPOSITORY = ""


# A target that is a file of this repository: in `[text](target)`, in `[name]: target`, and of a picture.
INLINE = r"\[([^\]]+)\]\((?!#|[a-z]+:)([^)\s]+)\)"
DEFINED = r"^\[([^\]]+)\]: (?![a-z]+:)(\S+)\n?"
PICTURE = r'<img src="(?![a-z]+:)([^"]+)"([^>]*>\n*)'


def index_page(text: str, repository: str) -> str:
    """A README whose links and pictures work on another host; without an address, one that has none of either."""
    if repository:
        text = re.sub(INLINE, rf"[\1]({repository}/blob/main/\2)", text)
        text = re.sub(DEFINED, rf"[\1]: {repository}/blob/main/\2\n", text, flags=re.MULTILINE)
        return re.sub(PICTURE, rf'<img src="{repository}/raw/main/\1"\2', text)
    for name, _ in re.findall(DEFINED, text, flags=re.MULTILINE):
        text = re.sub(rf"\[([^\]]+)\]\[{re.escape(name)}\]", r"\1", text)
    text = re.sub(DEFINED, "", text, flags=re.MULTILINE)
    return re.sub(PICTURE, "", re.sub(INLINE, r"\1", text))


def addresses(repository: str) -> dict[str, str]:
    """The addresses of the project."""
    pages = {"Homepage": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}
    return {name: repository + path for name, path in pages.items()} if repository else {}


if __name__ == "__main__":
    setup(
        long_description=index_page(Path("README.md").read_text(encoding="utf-8"), REPOSITORY),
        long_description_content_type="text/markdown",
        project_urls=addresses(REPOSITORY),
    )
