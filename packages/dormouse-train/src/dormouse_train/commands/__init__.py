"""One module a command of `dormouse`, imported when it runs."""
