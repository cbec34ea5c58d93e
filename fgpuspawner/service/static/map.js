/* The cluster map keeps itself up to date. It works without this, too. */
(function () {
  "use strict";

  async function ask(get) {
    const found = await get("map?part=1");
    if (found !== null) {
      for (const [id, html] of Object.entries(found.parts)) {
        window.fgpu.show(document.getElementById(id), html);
      }
    }
  }

  window.fgpu.keepUpToDate(document.getElementById("live"), ask, function () {});
})();
