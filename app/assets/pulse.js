// Whether the server is there, and whether its jobs have news. It says so when the server is not there, and goes on
// when it is again. Dash's own clock would start callbacks every second, which each cost the page some milliseconds:
// so they are started by news alone.
(function () {
  const EVERY_MS = 1000;
  const AGAIN_MS = 1500; // after a question that had no answer
  const PATIENCE_MS = 8000; // for one answer; a server that computes still answers this in milliseconds
  const LEAST_PATIENCE_MS = 4000;
  let missed = 0;
  let version = null;
  let told = null; // the sign of the jobs that the page was told of
  let since = 0;
  let heard = true;
  // A browser drops the answer to a callback that is called again meanwhile: the next news waits until the last was
  // heard, but not for ever, as an answer may be lost.
  let patience = LEAST_PATIENCE_MS;

  function tell(sign) {
    const waits = !heard && Date.now() - since < patience;
    if (sign === undefined || sign === told || waits || !window.dash_clientside.set_props) return;
    if (!heard) patience *= 2;
    told = sign;
    since = Date.now();
    heard = false;
    window.dash_clientside.set_props("told", { data: sign });
  }

  function say(text) {
    const place = document.getElementById("connection");
    if (!place) return;
    place.textContent = text;
    place.hidden = !text;
  }

  function beat() {
    return window.fetch("/alive", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) })
      .then((answer) => (answer.ok ? answer.json() : Promise.reject(new Error(answer.status))))
      .then((now) => {
        if (version !== null && now.version !== version) return window.location.reload();
        version = now.version;
        if (told === null) told = document.getElementById("connection")?.dataset.jobs ?? null;
        if (missed > 1) {
          say("");
          told = null;
          heard = true;
          patience = LEAST_PATIENCE_MS;
        }
        missed = 0;
        return tell(now.jobs);
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
    beat().finally(() => window.setTimeout(next, missed ? AGAIN_MS : EVERY_MS));
  }

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.pulse = {
    heard: function (sign) {
      if (sign === told) {
        heard = true;
        patience = LEAST_PATIENCE_MS;
      }
      return window.dash_clientside.no_update;
    },
  };
  window.setTimeout(next, EVERY_MS);
})();
