"""What is over its bound is named."""

from tests.support.sizes import too_large_files, too_large_folders


def test_sizes_over_a_bound_are_named(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "small.py").write_text("x = 1\n" * 400)
    long = "def long():\n" + "    x = 1\n" * 50
    (tmp_path / "pkg" / "large.py").write_text("x = 1\n" * 400 + long)
    assert [sentence.split(" (at most")[0] for sentence in too_large_files(tmp_path / "pkg")] == [
        "large.py has 451 lines",
        "large.py:401: long has 51 lines",
    ]
    (sentence,) = too_large_folders(tmp_path, {"pkg": ("*.py", 850)})
    assert sentence.startswith("pkg/ has 851 lines (at most 850)")
    assert list(too_large_folders(tmp_path, {"pkg": ("*.py", 851)})) == []
