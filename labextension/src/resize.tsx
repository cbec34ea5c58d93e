import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import {
  COMPUTE_STEP_PERCENT,
  MEMORY_STEP_MIB,
  type Offer,
  offerOf,
  wantedOf
} from './offer';
import type { IContext } from './parts';
import type { IResize, IThisSession } from './tokens';

/** How far something is that was asked for, and why it was not done. */
export function useWish(ask: () => Promise<unknown>): {
  busy: boolean;
  done: boolean;
  refusal: string | null;
  run: () => void;
} {
  const [state, setState] = React.useState<'none' | 'busy' | 'done'>('none');
  const [refusal, setRefusal] = React.useState<string | null>(null);
  const run = async () => {
    if (state === 'busy') {
      return;
    }
    setState('busy');
    setRefusal(null);
    try {
      await ask();
      setState('done');
    } catch (error) {
      setRefusal(error instanceof Error ? error.message : String(error));
      setState('none');
    }
  };
  return {
    busy: state === 'busy',
    done: state === 'done',
    refusal,
    run: () => void run()
  };
}

/** Offers another amount of this session's GPU; nothing where it keeps what it has whatever is asked for. */
export function Resize(props: {
  session: IThisSession;
  resize: IResize;
  context: IContext;
}): JSX.Element | null {
  const { session, resize, context } = props;
  const { trans, actions } = context;
  const form = React.useRef<HTMLFormElement>(null);
  const offer = offerOf(session);
  const { busy, refusal, run } = useWish(async () => {
    if (offer === null || session.id === null || form.current === null) {
      return;
    }
    const texts: Record<string, string> = {};
    new FormData(form.current).forEach((value, name) => {
      texts[name] = String(value).trim();
    });
    await actions.resize(session.id, wantedOf(offer, texts));
  });
  if (offer === null) {
    return null;
  }
  if (offer.kind === 'nothing') {
    return (
      <p className="jp-fgpu-Minor">
        {trans.__('No other amount of its GPU is possible now.')}
      </p>
    );
  }
  const asked = busy || resize.state === 'ASKED';
  return (
    <form
      ref={form}
      className="jp-fgpu-Resize"
      // What is wrong with an amount, and the nearest that works, is the service's to say: it knows both.
      noValidate
      onSubmit={event => {
        event.preventDefault();
        if (!asked) {
          run();
        }
      }}
    >
      {/* Another amount, another field: it starts with what the session has. */}
      <Fields key={session.amount} offer={offer} trans={trans} />
      <button type="submit" aria-disabled={asked}>
        {asked ? trans.__('Resizing…') : trans.__('Resize')}
      </button>
      <div role="status">
        {refusal !== null && !asked && (
          <p className="jp-fgpu-Problem">{trans.__('Not resized: %1', refusal)}</p>
        )}
      </div>
    </form>
  );
}

function Fields(props: { offer: Offer; trans: TranslationBundle }): JSX.Element {
  const { offer, trans } = props;
  if (offer.kind === 'fgpu') {
    const possible = trans.__(
      'Possible now: %1 to %2. Your kernels run on.',
      offer.least,
      offer.most
    );
    return (
      <>
        <label>
          {trans.__('New amount in fGPU')}
          <input
            type="number"
            name="fgpu"
            min={offer.least}
            max={offer.most}
            step={offer.step}
            defaultValue={offer.now}
            aria-describedby="jp-fgpu-possible"
          />
        </label>
        <span className="jp-fgpu-Minor" id="jp-fgpu-possible">
          {possible}
        </span>
      </>
    );
  }
  return offer.kind === 'nothing' ? (
    <></>
  ) : (
    <>
      <label>
        {trans.__('GPU memory in MiB')}
        <input
          type="number"
          name="gpu_memory_mib"
          min={MEMORY_STEP_MIB}
          step={MEMORY_STEP_MIB}
          defaultValue={offer.memoryMib}
        />
      </label>
      {offer.computePercent !== null && (
        <label>
          {trans.__('Compute in percent')}
          <input
            type="number"
            name="compute_percent"
            min={COMPUTE_STEP_PERCENT}
            max={100}
            step={COMPUTE_STEP_PERCENT}
            defaultValue={offer.computePercent}
          />
        </label>
      )}
      <span className="jp-fgpu-Minor">{trans.__('Your kernels run on.')}</span>
    </>
  );
}
