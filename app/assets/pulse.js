// Whether the server is there: says so when it is not, and goes on when it is again.
(function () {
  const EVERY_MS = 3000;
  const PATIENCE_MS = 8000; // for one answer; a server that computes still answers this in milliseconds
  let missed = 0;
  let version = null;

  function say(text) {
    const place = document.getElementById("connection");
    if (!place) return;
    place.textContent = text;
    place.hidden = !text;
  }

  function beat() {
    return window.fetch("/alive", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) })
      .then((answer) => (answer.ok ? answer.json() : Promise.reject(new Error(answer.status))))
      .then((told) => {
        if (version !== null && told.version !== version) return window.location.reload();
        version = told.version;
        if (missed > 1) {
          say("");
          // What was done meanwhile is sent now: an event without a step carries all that had no answer.
          window.dispatchEvent(new Event("tensoropt-back"));
        }
        missed = 0;
        return null;
      })
      .catch(() => {
        missed += 1;
        if (missed > 1) {
          say("The dashboard does not answer: it has ended, or this machine cannot reach it. Start it again with "
            + "“tensoropt dashboard” on the same port; this page goes on by itself then.");
        }
      });
  }

  function next() {
    const due = document.hidden ? Promise.resolve() : beat();
    due.finally(() => window.setTimeout(next, missed ? EVERY_MS / 2 : EVERY_MS));
  }
  window.setTimeout(next, EVERY_MS);
})();
