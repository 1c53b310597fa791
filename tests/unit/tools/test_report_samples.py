"""The report's completions and tokens: which are shown, how they are coloured, and that foreign text stays text."""

import json

import pytest

from grpo_ext.tools.report import report
from tests.support.pages import Page, line, make_run, opened, rerun_line, write_rerun, write_table

MARKUP = '</script></pre><b>bold</b><img src=x onerror="a=1">{{ 7*7 }}'
HOSTILE, SHOWN = MARKUP + "\u202eabc\x00&amp;", MARKUP + "\\u202eabc\\u0000&amp;"
HALF = "\ud83d"  # of a surrogate pair: cannot be written in UTF-8


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", [line(step, grad_norm=min(step, 20)) for step in (5, 10, 15, 20, 100000)])


def spans(page):
    """The class and the values of every token on a page."""
    found = [dict(attributes) for tag, attributes in page.elements if tag == "span"]
    return [(each.get("class", ""), each["title"]) for each in found if "title" in each]


def test_the_best_and_the_worst_of_the_first_the_middle_and_the_last_table_are_shown(run):
    for step in (3, 5, 10, 15, 20, 100000):  # 3 was logged by an earlier run in this folder
        texts = [f"text {step}.{place}." for place in range(7)]
        advantages = [0.0, -3.0, 2.0, 1.0, None, -1.0, 2.5]
        write_table(run, step, prompt=["asked"] * 7, completion=texts, exact=[1.0] * 7, advantage=advantages)
    page = Page(report(run))
    shown = [word.strip(".") for word in page.text.split() if word[-1] == "." and word[0].isdigit()]
    assert shown == [f"{step}.{place}" for step in (5, 15, 100000) for place in (6, 2, 5, 1)]
    assert "exact 1 · advantage 2.5 prompt asked completion text 5.6." in page.text


def test_equal_completions_are_shown_once_and_a_damaged_table_is_left_out(run):
    write_table(run, 5, prompt=["a"] * 6, completion=["same"] * 6, exact=[0.0] * 6, advantage=[0.0] * 6)
    write_table(run, 20, prompt=["a"], completion=["cut"], exact=[0.0], advantage=[0.0])
    table = run / "completions" / "completions_00020.parquet"
    table.write_bytes(table.read_bytes()[:-20])
    text = Page(report(run)).text
    assert text.count("same") == 1
    assert "Step 20" not in text


def test_a_conversation_shows_roles_and_tool_calls_and_other_columns(run):
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
    other = [{"type": "function", "function": {"name": "look", "arguments": {"word": "x"}}}]
    talks = [
        [{"role": "assistant", "content": "", "tool_calls": each}, {"role": "tool", "content": "3", "name": "add"}]
        for each in (calls, other)
    ]
    asked = [[{"role": "user", "content": "1 + 2?"}], [{"role": "user", "content": "x?"}]]
    columns = {"gold": ["three", None], "advantage": [1.0, -1.0]}
    write_table(run, 5, prompt=asked, completion=talks, **columns)
    write_table(run, 20, prompt=asked, completion=[json.dumps(each) for each in talks], **columns)
    text = Page(report(run)).text
    first = f"gold three · advantage 1 prompt, user 1 + 2? completion, assistant tool_calls {json.dumps(calls)} "
    assert text.count(first + "completion, tool, add 3") == 2  # as a column of messages, and as JSON text
    assert text.count(f"tool_calls {json.dumps(other)} ") == 2  # without the keys of the other call
    assert "gold -" in text


def test_what_is_long_is_shown_by_its_ends(run):
    talk = [{"role": "user", "content": f"turn {turn}."} for turn in range(1000)]
    text = "[{" + "a" * 16000 + "b" * 15998  # begins like JSON
    write_table(run, 5, prompt=[talk], completion=[text], exact=[1.0], advantage=[0.5])
    page = Page(report(run))
    write_table(run, 20, prompt=['[{"a":' * 100_000], completion=["short"], exact=[1.0], advantage=[0.5])
    assert "... 598,000 characters left out ..." in Page(report(run)).text  # too deep for JSON
    assert f"[{{{'a' * 1498} ... 30,000 characters left out ... {'b' * 500}" in page.text
    assert "turn 7. prompt, 988 messages left out prompt, user turn 996." in page.text


def test_without_tables_a_sentence_says_what_writes_them(run):
    assert "log_completions=True writes one at every log" in Page(report(run)).text


def test_a_token_is_coloured_by_what_the_step_did_to_it(run):
    changes = [1.0, -0.3, 0.1, 0.015, 0.005, 0.0, 1.0]
    masked = {"mask": [1, 1, 1, 1, 1, 1, 0]}
    up = rerun_line([*"abcdefg"], 2.0, changes, tokens=masked, share=-0.5) | {"cases": {"epsilon=0.3": [0.5] * 7}}
    down = rerun_line([*"hi"], -1.0, [-0.5, 0.5], share=-0.4)
    own = rerun_line([*"jkl"], [1.0, -1.0, None], [0.5, 0.5, 0.5], share=-0.3)
    unknown = rerun_line(["m"], None, tokens={"after": None}, share=None)
    write_rerun(run / "rerun" / "12", [unknown, own, down, up])
    page = Page(report(run))
    classes = ["up4", "down3", "up2", "up1", "", "", "masked", "up3", "down3", "up3", "down3", "", ""]
    assert [name for name, _ in spans(page)] == classes  # in the order of their shares of the loss
    first, last = spans(page)[0][1], spans(page)[6][1]
    values = ["old -2", "training -2", "after -1", "ratio 1", "entropy 0.25", "clipped 0", "share 0.125", "advantage 2"]
    assert first.splitlines() == ["token 0, id 100", *values, "epsilon=0.3 0.5"]
    assert last.splitlines()[0] == "token 6, id 106"
    for text in ("12: steps 11 to 12: the same bits", "model.layers.0 0.1", "advantage for each token"):
        assert text in page.text


def test_the_completions_that_weigh_most_are_shown_by_the_ends_of_their_tokens(run):
    lines = [
        rerun_line([f"t{number}."] * 500, gradient={"norm": number / 10, "cosine": -0.5}, row=number)
        for number in range(20)
    ]
    for name, step in (("a", 7), ("b", 30), ("c", 4)):
        write_rerun(run / "rerun" / name, lines if step == 30 else [rerun_line(["x"])], step=step)
    with open(run / "rerun" / "a" / "step.jsonl", "a") as file:
        file.write('{"place": 1, "row"')  # it is being written
    page = Page(report(run))
    assert page.text.index("c: steps") < page.text.index("a: steps") < page.text.index("b: steps")
    for number in range(20):
        assert page.text.count(f"t{number}.") == (400 if number >= 4 else 0)
    assert page.text.count("... 100 tokens left out ...") == 16
    assert "row 19 · generation 3 · advantage 1 · share of the loss -0.01 · gradient norm 1.9, cosine" in page.text
    assert spans(page)[2 + 300][1].startswith("token 400, id 500\n")


def test_the_folder_of_a_rerun_has_a_page_without_a_log(tmp_path):
    write_rerun(tmp_path / "12", [rerun_line(["yes"], answer="42")], loss=None)
    page = Page(report(tmp_path / "12"))
    assert "Loss -, gradient norm 0.3; by layer: model.layers.0 0.1 The 1" in page.text
    assert "answer 42 completion yes" in page.text
    assert "Curves" not in page.text


def test_what_a_rerun_does_not_know_is_left_out(tmp_path):
    line = rerun_line(["yes"])
    for name in ("row", "generation", "rewards"):  # the trail of a large rollout batch sums up
        del line[name]
    line["tokens"] = {name: line["tokens"][name] for name in ("ids", "text")}  # on no process
    write_rerun(tmp_path / "12", [line], layers={})
    page = Page(report(tmp_path / "12"))
    assert "gradient norm 0.3. The 1" in page.text
    assert "advantage 1 · share of the loss -0.01 prompt question completion yes" in page.text
    assert spans(page) == [("", "token 0, id 100\nadvantage 1")]


@pytest.fixture
def hostile(tmp_path):
    """A run whose texts are hostile in all places, and long; with one step that was run again."""
    names = (f"rewards/{MARKUP}/mean", "rewards/_a$b{/mean")  # the second is half a formula
    run = make_run(tmp_path / "run", [line(n, **dict.fromkeys(names, n)) for n in (1, 5)], loss_type=HOSTILE)
    calls = [{"function": {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}}]
    talk = [{"role": HOSTILE, "content": HOSTILE, "tool_calls": calls}]
    columns = {"completion": [talk], "exact": [1.0], HOSTILE: [HOSTILE], "advantage": [1.0]}
    write_table(run, 5, prompt=[HOSTILE + "x" * 40000], **columns)
    texts = [HOSTILE, HALF, "\n", "", *["word" * 100] * 5000]
    lines = [rerun_line(texts, prompt=HOSTILE, answer=HOSTILE, rewards={HOSTILE: 1.0}, share=0.5)]
    lines += [rerun_line(["a", "b", "c"], 1.0, [1.0, -1.0, 0.0], prompt=talk)]
    write_rerun(run / "rerun" / "12", lines, text=HOSTILE, layers={HOSTILE: 1.0})
    return run


def test_foreign_text_stays_text_and_long_completions_leave_the_page_small(hostile):
    path = report(hostile)
    page = Page(path)
    assert not {"script", "b"} & {*page.tags}
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert [value[:5] for tag, name, value in page.attributes if (tag, name) == ("img", "src")] == ["data:"]  # a plot
    assert page.text.count(SHOWN) >= 10
    for text in (f"loss_type {SHOWN}", f"rewards/{MARKUP}/mean 1 5 1 5", "rewards/_a$b{/mean 1 5 1 5"):
        assert text in page.text
    assert "\\ud83d" in page.text
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize(("scheme", "text"), [(0, "rgb(255, 255, 255)"), (1, "rgb(0, 0, 0)")], ids=["dark", "light"])
def test_a_browser_on_a_telephone_shows_the_page(hostile, tmp_path, scheme, text):
    found = opened(report(hostile), tmp_path, f"--blink-settings=preferredColorScheme={scheme}")
    assert found["width"] == 390
    assert found["text"] == text
    assert found["foreign"] == 0
    assert found["wide"] == 0
    assert [width > 0 for width in found["images"]] == [True]
    assert found["strips"][0].startswith(SHOWN + "\\ud83d↵\n·wordword")
    assert found["strips"][-1] == "abc"
    up, down, neither = found["backgrounds"][-3:]
    assert (up, down, neither) == ("rgba(0, 150, 60, 0.72)", "rgba(215, 40, 40, 0.72)", "rgba(0, 0, 0, 0)")
