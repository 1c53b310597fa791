"""Runs written by hand for the report, and its pages, parsed or opened in a browser."""

import json
import shutil
import subprocess
from html.parser import HTMLParser
from urllib.parse import unquote

import pandas
import pytest

from tests.support.trails import write_lines

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
# opens the page in a frame as wide as a telephone and writes what it finds as the text of the document
FRAME = """<!DOCTYPE html><html style="color-scheme: light dark"><body>
<iframe src="PAGE" width="390" height="800" style="border: 0"></iframe>
<script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument
  page.querySelectorAll("details").forEach(part => part.open = true)
  const found = {
    width: page.documentElement.scrollWidth,
    text: getComputedStyle(page.body).color,
    images: [...page.images].map(image => image.naturalWidth),
    foreign: page.querySelectorAll("script, b, base, [onerror]").length,
    wide: [...page.querySelectorAll("pre")].filter(part => part.scrollWidth > part.clientWidth).length,
    strips: [...page.querySelectorAll("pre:has(span)")].map(strip => strip.innerText),
    backgrounds: [...page.querySelectorAll("pre span")].map(token => getComputedStyle(token).backgroundColor),
  }
  document.body.textContent = encodeURIComponent(JSON.stringify(found))
}
</script></body></html>"""


class Page(HTMLParser):
    """Tags and visible text of a page."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(path.read_text())
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, attrs))
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.words.append(data)


def line(step, **values):
    """A line of a run's log."""
    return {
        "line": "log",
        "step": step,
        "time": 2.0 * step,
        "peak_memory_mib": 100.0 + step,
        "values": {"reward": 0.0, **values},
    }


def make_run(folder, lines, **changes):
    """A folder with a log of these lines."""
    folder.mkdir(parents=True)
    settings = {"loss_type": "dapo", "learning_rate": 1e-3, "max_steps": 4} | changes
    model = {"class": "Tiny", "parameters": 12345, "sha256": "ab"}
    start = {"started": "2020-01-01", "plan": "16 completions", "model": model, "settings": settings}
    began = {"line": "start", "step": 0, **start}
    write_lines(folder / "steps.jsonl", (began, *lines))
    return folder


def write_table(run, step, **columns):
    """A table of completions, written as TRL writes it."""
    (run / "completions").mkdir(exist_ok=True)
    table = pandas.DataFrame({"step": [step] * len(columns["prompt"]), **columns})
    table.to_parquet(run / "completions" / f"completions_{step:05d}.parquet")


def rerun_line(texts, advantage=1.0, changes=None, **others):
    """What is written of a completion of a step that was run again: its tokens' log-probabilities rise by `changes`."""
    count = len(texts)
    changes = changes or [0.5] * count
    tokens = {"ids": [*range(100, 100 + count)], "text": texts, "mask": [1] * count, "sampler": None}
    tokens |= {"old": [-2.0] * count, "training": [-2.0] * count, "after": [-2.0 + change for change in changes]}
    tokens |= {"ratio": [1.0] * count, "entropy": [0.25] * count, "kl": None, "clipped": [False] * count}
    about = {"place": 0, "row": 17, "generation": 3, "prompt": "question", "answer": None, "gradient": None}
    about |= {"completion": "".join(texts), "rewards": {"exact": 1.0}, "advantage": advantage, "share": -0.01}
    tokens |= {"share": [0.125] * count} | others.pop("tokens", {})
    return about | others | {"tokens": tokens}


def write_rerun(folder, lines, **about):
    """A step that was run again, in a folder of its own."""
    folder.mkdir(parents=True)
    step = {"step": 12, "loss": 0.01, "grad_norm": 0.3, "layers": {"model.layers.0": 0.1}}
    step |= {"verdict": "same bits", "text": "steps 11 to 12: the same bits", **about}
    write_lines(folder / "step.jsonl", (step, *lines))


def opened(page, folder, *options):
    """What a browser says of a page, 390 pixels wide; skips the test where there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    (folder / "frame.html").write_text(FRAME.replace("PAGE", page.as_uri()))
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files")
    command = [browser, *flags, *options, f"--user-data-dir={folder / 'browser'}", "--dump-dom"]
    done = subprocess.run([*command, (folder / "frame.html").as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(unquote(done.stdout.partition("<body>")[2].partition("</body>")[0]))
