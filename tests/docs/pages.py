"""The pages whose contents are checked, by their path in the repository."""

from tests.repo.source import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/**/*.md", "core/*.md", "integrations/*/*.md", "sample_apps/**/*.md")
    for path in sorted(ROOT.glob(pattern))
}
