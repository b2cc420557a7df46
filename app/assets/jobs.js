// A list that gets another card is made anew by Dash: what was open, scrolled and focused in it is put back.
(function () {
  const open = new Set();
  const CAN_FOCUS = "button, a, summary, pre[tabindex]";
  let focused = null; // [card's id, which of its controls]
  let awaited = null; // the id of a card that a link led to before it was there

  const cardOf = (element) => element && element.closest && element.closest(".job");

  document.addEventListener("toggle", (event) => {
    const card = cardOf(event.target);
    if (!card || !event.target.isConnected) return;
    if (event.target.open) open.add(card.id);
    else open.delete(card.id);
  }, true);

  document.addEventListener("focusin", (event) => {
    const card = cardOf(event.target);
    focused = card ? [card.id, [...card.querySelectorAll(CAN_FOCUS)].indexOf(event.target)] : null;
  });

  document.addEventListener("click", (event) => {
    const link = event.target.closest && event.target.closest("a[href^='#job-']");
    awaited = link && !document.querySelector(link.hash) ? link.hash.slice(1) : null;
  });

  function putBack() {
    const late = awaited && document.getElementById(awaited);
    if (late) {
      awaited = null;
      late.scrollIntoView();
    }
    open.forEach((id) => {
      const details = document.querySelector("#" + id + " details");
      if (details && !details.open) details.open = true;
    });
    const card = focused && document.getElementById(focused[0]);
    if (card && document.activeElement === document.body) {
      const control = card.querySelectorAll(CAN_FOCUS)[focused[1]];
      if (control) control.focus({ preventScroll: true });
    }
  }

  function watch() {
    const list = document.getElementById("jobs");
    if (!list) return window.setTimeout(watch, 200);
    return new MutationObserver(putBack).observe(list, { childList: true });
  }
  watch();
})();
