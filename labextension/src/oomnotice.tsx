import type { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import * as React from 'react';

import { ProcessTable } from './details';
import { asSentence } from './format';
import { useRequest } from './resize';
import type { IExplanation } from './tokens';

/** The notice under a cell that ran out of GPU memory. It is no output, so it is not saved in the notebook. */
export class OutOfMemoryNotice extends ReactWidget {
  constructor(
    private readonly _options: {
      explanation: IExplanation;
      /** The path of the notebook that the cell is in. */
      notebook: string;
      /** The Hub's form with the larger amount, or null. */
      href: string | null;
      /** Gives this session the larger amount now, or null where that is not possible; rejects with a message to show. */
      grow: (() => Promise<unknown>) | null;
      trans: TranslationBundle;
    }
  ) {
    super();
    this.addClass('jp-fgpu-OutOfMemory');
    // Keys are for the buttons here, and not for the notebook.
    this.node.setAttribute('data-lm-suppress-shortcuts', 'true');
  }

  protected render(): JSX.Element {
    const { explanation, notebook, href, grow, trans } = this._options;
    const { larger } = explanation;
    const title = trans.__('The GPU memory of this session ran out');
    return (
      // A status is announced only where it was before it had anything to say.
      <section aria-label={title} role="alert">
        <strong>{title}</strong>
        <p>{limitText(explanation, trans)}</p>
        <ProcessTable
          processes={explanation.processes}
          own={notebook}
          trans={trans}
        />
        <p>
          {trans.__(
            'Free what is no longer needed, shut down other kernels that hold GPU memory, or use smaller batches.'
          )}
        </p>
        {larger !== null && grow !== null && (
          <Grow larger={larger} grow={grow} trans={trans} />
        )}
        {larger !== null && grow === null && (
          <p>
            {trans.__(
              'A session with %1 would have %2 MiB. Once this one has ended: %3',
              larger.amount,
              larger.gpu_memory_mib,
              asSentence(larger.text ?? trans.__('Its start is not known.'))
            )}
          </p>
        )}
        <div className="jp-fgpu-Actions">
          {larger !== null && grow === null && href !== null && (
            <a href={href} target="_blank" rel="noopener">
              {trans.__('Open the form with %1', larger.amount)}
            </a>
          )}
          <button type="button" onClick={() => this.dispose()}>
            {trans.__('Dismiss')}
          </button>
        </div>
      </section>
    );
  }
}

/** Offers the larger amount in place: no session ends, and no kernel. */
function Grow({ larger, grow, trans }: {
  larger: NonNullable<IExplanation['larger']>;
  grow: () => Promise<unknown>;
  trans: TranslationBundle;
}): JSX.Element {
  const { busy, refusal, done, run } = useRequest(grow);
  return (
    <>
      {!done && (
        <p>
          {trans.__(
            '%1 is possible now: %2 MiB. Your kernel stays.',
            larger.amount,
            larger.gpu_memory_mib
          )}
        </p>
      )}
      <div role="status">
        {done && (
          <p>
            {trans.__(
              'This session has %1 now, %2 MiB. Run the cell again.',
              larger.amount,
              larger.gpu_memory_mib
            )}
          </p>
        )}
        {refusal !== null && (
          <p className="jp-fgpu-Problem">{trans.__('Not resized: %1', refusal)}</p>
        )}
      </div>
      {!done && (
        <div className="jp-fgpu-Actions">
          <button type="button" aria-disabled={busy} onClick={run}>
            {busy ? trans.__('Growing…') : trans.__('Grow to %1 now', larger.amount)}
          </button>
        </div>
      )}
    </>
  );
}

/** Return the limit, the memory held, and the request, each if known. */
function limitText(
  { limit_mib, used_mib, tried_mib }: IExplanation,
  trans: TranslationBundle
): string {
  const parts: string[] = [];
  if (limit_mib !== null) {
    parts.push(trans.__('Its limit is %1 MiB.', limit_mib));
  }
  if (used_mib !== null) {
    parts.push(trans.__('It now holds %1 MiB.', used_mib));
  }
  if (tried_mib !== null) {
    parts.push(trans.__('The program asked for %1 MiB more.', tried_mib));
  }
  return parts.join(' ');
}
