"""The command line: one file per command, each a thin layer over the library.

`main` builds the application and turns errors into exit codes; `console` owns the two
output streams; `options` holds what commands share. Commands import the rest of autoshard
when they run, so that `autoshard --help` is fast and planning never loads FBGEMM.
"""
