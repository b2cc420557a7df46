// The plan page asks for simulations once a person rests on a point, not for every one that is walked past.
(function () {
  const REST_MS = 600; // an assumption: longer than the pause between two keys, shorter than a look
  let last = 0;

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.why = {
    rest(children) {
      last += 1;
      const mine = last;
      if (!children) return window.dash_clientside.no_update;
      return new Promise((resolve) => {
        window.setTimeout(() => resolve(mine === last ? mine : window.dash_clientside.no_update), REST_MS);
      });
    },
  };
})();
