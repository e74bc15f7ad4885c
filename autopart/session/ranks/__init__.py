"""Agreement between ranks: collective calls compared, errors of one rank raised on all.

With every call the ranks compare in the background which call each makes, its number, and digests of batch and model,
and learn what the first rank counted of the batch.  A step with a batch like an earlier one begins at once where the
shares of its losses are known: on the first rank, and elsewhere if they follow from the rows.  A rank waits for the
agreement before its first message or sum, so a disagreement leaves no trace and the next step goes on.  A new kind of
batch, shards, shared batch statistics, an optimizer shared among replicas and NCCL wait for it first.

May enter: exchanges of small messages.  Tensors of the model are moved by `placement`.
"""
