"""The three small frozen languages and what they speak about.

`graph` says what is computed, `plan` says where, `program` says when; `cluster`, `cost` and `timeline` are the
facts beside them and `errors` is the one error tree.  Nothing here imports anything outside the standard library,
and nothing here holds a torch object.
"""
