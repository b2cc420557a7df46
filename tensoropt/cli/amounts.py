"""Arguments that say how long a training is and what its devices cost: ``--tokens``, ``--price``, ..."""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.units import parse_count

OF_AMOUNT = ("tokens", "samples", "epochs", "steps", "samples_per_epoch", "price", "currency")
"""What :func:`add_amount` adds."""


def add_amount(verb: argparse.ArgumentParser) -> None:
    """How long the training is, and prices."""
    group = verb.add_argument_group("what a training takes and costs")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--tokens", metavar="1e9", help="a training of so many tokens (300B, 1.5T, ...)")
    length.add_argument("--samples", metavar="N", help="of so many samples")
    length.add_argument("--epochs", metavar="N", help="of so many epochs; with --samples-per-epoch")
    length.add_argument("--steps", metavar="N", help="of so many steps; default: 1000")
    group.add_argument("--samples-per-epoch", metavar="M", help="the size of the data set, with --epochs")
    group.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="2.5|KIND=2.5",
        help="money per device-hour, of all devices or of a kind (repeat it, or separate by commas); "
        "default: what the cluster says, if anything",
    )
    group.add_argument(
        "--currency", default="", metavar="EUR", help="what the money is called; default: nothing"
    )


def amount_option(options: argparse.Namespace) -> Any:
    """The :class:`~tensoropt.plan.amounts.Amount` that is asked for; None where nothing is.

    Raises:
        TensorOptError: it is no amount, or an epoch's size is missing.
    """
    from tensoropt.plan.amounts import AMOUNTS, Amount

    size = options.samples_per_epoch
    of_epoch = None if size is None else parse_count(size, "--samples-per-epoch")
    for unit in AMOUNTS:
        text = getattr(options, unit)
        if text is not None:
            return Amount(parse_count(text, f"--{unit}"), unit, of_epoch)
    if of_epoch is not None:
        raise TensorOptError("--samples-per-epoch says what an epoch is; give --epochs with it")
    return None


def tariff_option(options: argparse.Namespace) -> Any:
    """The :class:`~tensoropt.plan.amounts.Tariff` that ``--price`` and ``--currency`` say.

    Raises:
        TensorOptError: a price is none, or there are several for the same devices.
    """
    from tensoropt.plan.amounts import Tariff, prices_of

    price, by_kind = prices_of(",".join(options.price))
    return Tariff(price, by_kind, options.currency.strip())


def rated_point(options: argparse.Namespace, found: Any, index: int) -> tuple[list[str], dict[str, Any]]:
    """Return the facts of a point as lines, what the training that is asked for takes and costs among them,
    and the latter as data.

    Raises:
        TensorOptError: an amount or a price is none, or is of devices that the cluster does not have.
    """
    from tensoropt.plan.facts import rate_facts
    from tensoropt.plan.facts_table import fact_lines
    from tensoropt.plan.figure_rows import FigureRow, rates_data
    from tensoropt.plan.rates import kinds_of
    from tensoropt.report.table import point_lines

    amount, tariff = amount_option(options), tariff_option(options)
    tariff.check(kinds_of(found))
    row = FigureRow.of(found, index, tariff)
    return [*point_lines(row), *fact_lines(rate_facts(row, amount))], rates_data(row, amount)
