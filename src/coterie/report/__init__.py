"""Reports: the same tables for a terminal and for an offline HTML page, and figures for the page.

`page` assembles, `svg` draws, `tables` holds values; what a particular report says is in a module of its own.
"""
