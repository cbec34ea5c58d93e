// Runs in a hidden frame of the Hub's launch form, and asks this service for it.
//
// The form cannot ask by itself: the browser signs in to the service only by navigating to it, as a frame
// does, and the service's cookies are for the service's own path.
"use strict";

(function () {
  const own = document.currentScript.dataset;
  const here = window.location.origin;

  window.addEventListener("message", async function (event) {
    if (event.origin !== here || event.source !== window.parent || typeof event.data.query !== "string") {
      return;
    }
    const reply = { fgpu: "forecast", id: event.data.id, answer: null };
    try {
      const answer = await fetch(own.prefix + "api/v1/forecast?" + event.data.query, {
        headers: { "X-XSRFToken": own.xsrf },
        credentials: "same-origin",
      });
      if (answer.ok) { reply.answer = await answer.json(); }
    } catch (error) {
      // No answer is what the form is told then.
    }
    window.parent.postMessage(reply, here);
  });
  window.parent.postMessage({ fgpu: "ready" }, here);
})();
