"""The batch-independence check: does any record of a physical batch move another's loss or gradient?

Clipping bounds what a record does to its own gradient. It bounds nothing where a record changes the gradients of
others. So at some steps (`check.is_due`) a physical batch is first handed to the caller's loop in a few altered forms.
Their losses are compared, and nothing is learnt from them. Three things must hold:

1. No operator may compute across records on the way to the losses.
2. Forms of other sizes must consist of the same operators with the same arguments, up to sizes that grow with the
   number of records.
3. A record that was kept must have the same loss and the same gradient in all forms.

The first two need no values, so no mixing is too small or too rare for them. The third covers what they cannot see:
values that pass through Python, operators that move records, gradients that a hook alters.

For a batch of three records a, b, c and `losses = model(x) / len(x)`, the forms are, in order:

    as it is     a b c          the operators are `addmm(…)` and `div(…, 3)`
    exchanged    a c c, c b c   a, then b and c, must have the loss that they had
    resized      b c, a c       here the operator is `div(…, 2)`: refused, as the losses depend on the number of records
    alone        c              (not reached)

How the parts fit:

    check          computes the forms and asks for the three conditions; forward passes that write to their model
    fixed_draws    the altered forms, and random operators that draw nothing
    watch          follows the operators of one forward pass, and the line of the caller's code that runs, by
        rules          which record each entry of an operator's result depends on, in terms of
        states         free of records, rows of records, mixed, unknown; where the records lie in a tensor's storage
        decisions      whether Python code decides by a value that it read
    comparison     conditions 2 and 3: differences between two sequences of operators, between losses and gradients
    collation      the caller's collate function: the same conditions for batches
    data_sets      records that depend on what was read before, or hold the data of others
    messages       what is refused, and what is said then

What the check cannot see is on the page docs/concepts.md.
"""
