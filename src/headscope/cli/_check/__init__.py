"""How ``headscope check`` reads its targets and conventions, runs submissions, and shows results of a class."""
