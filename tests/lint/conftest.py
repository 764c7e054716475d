"""The folders of scripts that are checked, not run."""

# They are read as text: pytest would import them to look for doctests.
collect_ignore_glob = ["correct/*", "wrong/*"]
