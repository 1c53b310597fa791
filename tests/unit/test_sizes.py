"""What `make lint` holds of the package's sizes is found where it is too large."""

from tests.support.sizes import FILE, FUNCTION, PACKAGE, too_large


def test_a_large_file_function_and_package_are_named(tmp_path):
    (tmp_path / "long.py").write_text("x = 1\n" * (FILE + 1))
    body = "    x = 1\n" * FUNCTION
    (tmp_path / "function.py").write_text(f"def small():\n    pass\n\n\ndef large():\n{body}")
    for number in range(PACKAGE // FILE + 1):
        (tmp_path / f"part_{number}.py").write_text("x = 1\n" * FILE)
    found = list(too_large(tmp_path))
    assert [sentence.split(" has ")[0] for sentence in found] == ["function.py:5: large", "long.py", "the package"]


def test_code_at_its_bound_passes(tmp_path):
    (tmp_path / "file.py").write_text("def f():\n" + "    x = 1\n" * (FUNCTION - 1) + "y = 1\n" * (FILE - FUNCTION))
    assert list(too_large(tmp_path)) == []
